"""BatchStore: state of each batch, in one JSON file each, and the records of its answered lines.

Records are appended to one file for answers and one for errors. They define which lines are done. After a restart, the records
are read, a truncated last record is dropped, and the remaining lines are processed."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from server.batches import api_types
from server.batches.api_types import BatchBody, BatchUsage, Status
from server.batches.files import Owner, write_whole
from server.batches.lines import digest
from server.http.errors import BatchObjectNotFound


@dataclass(frozen=True, slots=True)
class UsageCounts:
    input_tokens: int = 0
    cached_tokens: int = 0  # of the input's
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of the output's

    @classmethod
    def of_answer(cls, body: bytes) -> UsageCounts:
        """Return the token usage in the JSON body of an answer."""
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return cls.of({"usage": msgspec.json.decode(fields["usage"])} if "usage" in fields else {})

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> UsageCounts:
        """Return the token usage that an answer reports: `prompt_tokens` in a chat or completion, `input_tokens` in a response."""
        usage = body.get("usage") or {}
        prompt = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        completion = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        return cls(
            usage.get("prompt_tokens", usage.get("input_tokens", 0)),
            prompt.get("cached_tokens", 0),
            usage.get("completion_tokens", usage.get("output_tokens", 0)),
            completion.get("reasoning_tokens", 0),
        )

    def __add__(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def body(self) -> BatchUsage:
        return BatchUsage(
            self.input_tokens,
            api_types.CachedTokens(self.cached_tokens),
            self.output_tokens,
            api_types.ReasoningTokens(self.reasoning_tokens),
            self.input_tokens + self.output_tokens,
        )


logger = logging.getLogger("oneloop.batch")

ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
MAX_ENDED = 1000  # ended batches that are kept in the list


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """State of a batch. `times`: start of each status, in seconds since the epoch. `errors`: reasons why it failed. `window`:
    its completion_window; `window_s`: the same in seconds. `output_ttl_s`: lifetime of its output files; None keeps them until
    deleted. `is_over`: whether the window passed before the batch was done."""

    id: str
    owner: str | None
    input_file_id: str
    endpoint: str
    status: Status = "validating"
    window: str = "24h"
    window_s: int = 86_400
    output_ttl_s: int | None = None
    is_over: bool = False
    usage: UsageCounts = field(default_factory=UsageCounts)
    metadata: Mapping[str, str] | None = None
    times: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[Mapping[str, Any], ...] = ()

    @property
    def created_at(self) -> int:
        return self.times["validating"]

    @property
    def expires_at(self) -> int:
        return self.created_at + self.window_s

    def becomes(self, status: Status, now: int, **more: Any) -> StoredBatch:
        return replace(self, status=status, times={**self.times, status: now}, **more)

    @property
    def body(self) -> BatchBody:
        has_ended = self.status in ENDED
        times: dict[str, Any] = {f"{status}_at": at for status, at in self.times.items() if status != "validating"}
        return BatchBody(
            id=self.id,
            endpoint=self.endpoint,
            errors=api_types.BatchErrors(data=[api_types.BatchError(**error) for error in self.errors])
            if self.errors
            else None,
            input_file_id=self.input_file_id,
            completion_window=self.window,
            status=self.status,
            output_file_id=self.output_file_id if has_ended else None,
            error_file_id=self.error_file_id if has_ended else None,
            created_at=self.created_at,
            expires_at=self.expires_at,
            request_counts=api_types.RequestCounts(self.total, self.completed, self.failed),
            usage=self.usage.body,
            metadata=None if self.metadata is None else dict(self.metadata),
            **times,
        )


class BatchSummary(NamedTuple):
    """Summary of a batch's records: counts, digests of custom_ids, numbers of lines without custom_id, bytes, and usage."""

    answered: int
    refused: int
    custom_ids: set[bytes]
    numbers: set[int]
    num_bytes: int
    usage: UsageCounts


class BatchStore:
    """Store of batches. The constructor reads the folder. The index belongs to the event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._batches = {batch.id: batch for batch in self._read()}

    def _read(self) -> Iterator[StoredBatch]:
        for path in sorted(self._folder.glob("*.json")):
            try:
                content = json.loads(path.read_text())
                usage = UsageCounts(**content.get("usage", {}))
                batch = StoredBatch(**{**content, "errors": tuple(content["errors"]), "usage": usage})
                assert batch.id == path.stem
            except (OSError, ValueError, TypeError, KeyError, AssertionError):
                logger.warning("%s is not a stored batch and is ignored", path)
                continue
            yield batch

    def find(self, id: str, owner: Owner) -> StoredBatch:
        """Return the batch `id` of `owner`. Raises BatchObjectNotFound."""
        batch = self._batches.get(id)
        if batch is None or not owner.owns(batch.owner):
            raise BatchObjectNotFound("Batch", id)
        return batch

    def now(self, id: str) -> StoredBatch:
        return self._batches[id]

    def owned(self, owner: Owner) -> list[StoredBatch]:
        """Return the batches of `owner`, newest first."""
        found = [batch for batch in self._batches.values() if owner.owns(batch.owner)]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def unfinished(self) -> list[StoredBatch]:
        """Return the batches that have not ended, oldest first."""
        found = [batch for batch in self._batches.values() if batch.status not in ENDED]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id))

    def set(self, batch: StoredBatch) -> None:
        """Set the state of a batch in memory. Changed counts need no `save`, because they can be computed from the records."""
        self._batches[batch.id] = batch

    def save(self, batch: StoredBatch) -> None:
        """Write the current state of `batch` to disk. Call it on a thread."""
        write_whole(self._folder / f"{batch.id}.json", json.dumps(asdict(batch)).encode())

    def forget(self) -> list[str]:
        """Drop the oldest ended batches above MAX_ENDED from memory. Return their ids, for `remove`."""
        ended = sorted(
            (batch for batch in self._batches.values() if batch.status in ENDED), key=lambda batch: batch.created_at
        )
        gone = [batch.id for batch in ended[: max(0, len(ended) - MAX_ENDED)]]
        for id in gone:
            del self._batches[id]
        return gone

    def remove(self, ids: list[str]) -> None:
        """Delete the files of the batches `ids`. Call it on a thread."""
        for id in ids:
            (self._folder / f"{id}.json").unlink(missing_ok=True)

    # --- records --------------------------------------------------------------------------------------------------

    def records(self, id: str) -> tuple[Path, Path]:
        """Return the paths of the batch's records: answers, and errors."""
        return self._folder / f"{id}.output.jsonl", self._folder / f"{id}.error.jsonl"

    def append(self, id: str, record: bytes, *, answered: bool) -> None:
        """Append `record` to the answers, or to the errors unless `answered`. Call it on a thread."""
        with self.records(id)[0 if answered else 1].open("ab") as file:
            file.write(record)

    def read_done(self, id: str) -> BatchSummary:
        """Read the records of a batch, drop a truncated last record, and return the summary. Call it on a thread."""
        counts, custom_ids, numbers, num_bytes, usage = [0, 0], set[bytes](), set[int](), 0, UsageCounts()
        for place, path in enumerate(self.records(id)):
            with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                end = 0
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    end += len(line)
                    counts[place] += 1
                    record = json.loads(line)
                    if record["response"] is not None:
                        usage += UsageCounts.of(record["response"]["body"])
                    if record["custom_id"] is not None:
                        custom_ids.add(digest(record["custom_id"]))
                    elif record["id"].startswith(_NUMBERED):
                        numbers.add(int(record["id"].removeprefix(_NUMBERED)))
                file.truncate(end)
                num_bytes += end
        return BatchSummary(counts[0], counts[1], custom_ids, numbers, num_bytes, usage)


_NUMBERED: Final = "batch_req_line_"  # see `lines.error_record_of`
