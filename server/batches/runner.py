"""BatchRunner: processes batches in the background, with lower priority than interactive requests.

The number of lines in progress is limited over all batches. A new line starts only if no request waits for the engine and the
engine can run one more sequence. Results are written to disk before they are counted, so a restarted process continues the
batches of a crashed process. All batches together count as one client in fair scheduling."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from starlette.types import ASGIApp

from server.batches.files import ADMINISTRATOR, OUTPUT, FileExpiry, FileStore, StoredFile, new_id
from server.batches.folder import BatchFolder
from server.batches.lines import (
    LineAnswer,
    LineCalls,
    LineRequest,
    RepeatedId,
    behind_others,
    count_lines,
    custom_id_of,
    digest,
    error_record_of,
    lines_of,
    read_line,
    record_of,
)
from server.batches.store import BatchStore, BatchSummary, StoredBatch, UsageCounts
from server.http.call import Call
from server.http.errors import ApiError, BatchOver, InvalidRequest, StorageFull, TooManyRequests, clip
from server.models.lifecycle import Lifecycle, LoadPhase

logger = logging.getLogger("oneloop.batch")

MAX_UNFINISHED = 100
MAX_LINES = 50_000  # OpenAI's
PAUSE_S = 0.05  # between looks at whether there is room
CALLER_KEY = b"batches"


class _Line(NamedTuple):
    """Line of a batch. `request`: the parsed request, or the error if the line is invalid."""

    number: int
    custom_id: str | None
    request: LineRequest | ApiError


@dataclass(slots=True, eq=False)
class _Run:
    """Execution of one batch. `gone`: set when the batch is cancelled. `failure`: reason why it cannot continue. `is_left`: this
    process stops, and another process continues it. `is_over`: its completion window has passed."""

    task: asyncio.Task[None] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    failure: Mapping[str, Any] | None = None
    is_left: bool = False
    is_over: bool = False

    @property
    def goes_on(self) -> bool:
        return not (self.gone.is_set() or self.is_left or self.failure is not None)


class BatchRunner:
    """Background execution of batches. `apps`: endpoints by URL. `limit_bytes`: maximum size of a line. `max_at_work`: maximum
    number of lines at a time; None means a quarter of the engine's. `by_priority`: whether the engine uses priorities. Belongs
    to one event loop."""

    def __init__(
        self,
        folder: BatchFolder,
        apps: Mapping[str, ASGIApp],
        lifecycle: Lifecycle,
        *,
        limit_bytes: int,
        max_at_work: int | None = None,
        by_priority: bool = False,
        pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(PAUSE_S),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._files: FileStore = folder.files
        self._shares = folder.shares
        self._store: BatchStore = folder.batches
        self._calls = LineCalls(apps)
        self._lifecycle = lifecycle
        self._limit_bytes = limit_bytes
        self._max_at_work = max_at_work
        self._by_priority = by_priority
        self._pause = pause
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        self.expiry = FileExpiry(folder.files, lambda: {batch.input_file_id for batch in folder.batches.unfinished()})
        self._expiring: asyncio.Task[None] | None = None
        self._places: asyncio.Semaphore | None = None  # for lines at work, once the engine says how many

    def resume(self) -> None:
        """Continue the batches of an earlier process. Call it on the running event loop."""
        self._expiring = asyncio.create_task(self.expiry.run(), name="file expiry")
        for batch in self._store.unfinished():
            self._begin(batch.id)

    async def submit(self, batch: StoredBatch) -> StoredBatch:
        """Store and start `batch`. Return its state. Raises TooManyRequests."""
        unfinished = Counter(each.owner for each in self._store.unfinished())
        if not self._shares.has_room(MAX_UNFINISHED, unfinished, batch.owner, 1):
            raise TooManyRequests(
                f"{unfinished.total()} batches are unfinished; the maximum is {MAX_UNFINISHED}{self._shares.hint}; wait for one "
                "to end, or cancel one",
                retry_after_s=60,
            )
        batch = batch.becomes("validating", int(self._clock()))
        self._store.set(batch)
        await asyncio.to_thread(self._store.save, batch)
        self._begin(batch.id)
        return batch

    async def cancel(self, id: str) -> StoredBatch:
        """Cancel the batch `id`. Finished answers are kept. Raises InvalidRequest for a batch that has ended or is ending."""
        batch = self._store.now(id)
        if batch.status in ("validating", "in_progress"):
            batch = await self._becomes(id, "cancelling")
            self._runs[id].gone.set()
        elif batch.status != "cancelling":
            raise InvalidRequest(f"a batch with status {batch.status} cannot be cancelled")
        return batch

    def expire(self, id: str) -> None:
        """End the batch `id`, whose completion window has passed. Its unanswered lines are recorded as expired."""
        run = self._runs.get(id)
        if run is not None and self._store.now(id).status in ("validating", "in_progress"):
            run.is_over = True
            run.gone.set()

    def leave(self) -> None:
        """Stop without waiting for batches. Lines in progress are cancelled; another process continues the batches later."""
        for run in self._runs.values():
            run.is_left = True
            run.gone.set()

    async def close(self) -> None:
        """Call `leave`, and return when all tasks have ended."""
        self.leave()
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.wait({self._expiring})
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if self._lifecycle.loaded is None:
            for task in tasks:
                task.cancel()  # it waits for a model
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one batch ------------------------------------------------------------------------------------------------

    def _begin(self, id: str) -> None:
        run = self._runs[id] = _Run()
        run.task = asyncio.create_task(self._work(id, run), name=id)

    async def _work(self, id: str, run: _Run) -> None:
        left_s = max(0.0, self._store.now(id).expires_at - self._clock())
        timer = asyncio.get_running_loop().call_later(left_s, self.expire, id)
        try:
            await self._lifecycle.until_loaded()
            if self._store.now(id).status == "validating":
                await self._validate(id, run)
            done = await asyncio.to_thread(self._store.read_done, id)
            batch = self._store.now(id)
            self._files.account(batch.owner, done.num_bytes)
            self._store.set(replace(batch, completed=done.answered, failed=done.refused, usage=done.usage))
            if self._store.now(id).status == "in_progress":
                await self._answer_lines(id, run, done)
                if run.is_over and not run.is_left and self._store.now(id).status == "in_progress":
                    await self._give_up(id, run)
            if not run.is_left and self._store.now(id).status != "failed":
                await self._end(id, run)
        except Exception:
            logger.exception("%s cannot continue; the next server start retries it", id)
        finally:
            timer.cancel()
            del self._runs[id]
            self.expiry.look_again()

    async def _becomes(self, id: str, status: Any, **more: Any) -> StoredBatch:
        batch = self._store.now(id).becomes(status, int(self._clock()), **more)
        self._store.set(batch)
        await asyncio.to_thread(self._store.save, batch)
        return batch

    async def _validate(self, id: str, run: _Run) -> None:
        batch = self._store.now(id)
        error: dict[str, Any] | None = None
        total = 0
        try:
            total = await asyncio.to_thread(self._count, batch)
        except RepeatedId as repeated:
            error = _error("duplicate_custom_id", str(repeated), "custom_id", repeated.number)
        except OSError:
            error = _error("invalid_input", f"the input file {batch.input_file_id} no longer exists")
        if not error and not total:
            error = _error("empty_file", "the file contains no requests")
        if total > MAX_LINES:
            error = _error("too_many_requests", f"the file has {total} lines; the maximum is {MAX_LINES}")
        if self._store.now(id).status != "validating":
            return  # it was cancelled
        if error is None:
            await self._becomes(id, "in_progress", total=total)
        else:
            await self._becomes(id, "failed", errors=(error,))

    def _count(self, batch: StoredBatch) -> int:
        with self._files.path(batch.input_file_id).open("rb") as file:
            return count_lines(file, self._limit_bytes)

    async def _end(self, id: str, run: _Run) -> None:
        """Convert the records of a batch to output files, and set its final state."""
        batch = self._store.now(id)
        last = "cancelled" if batch.status == "cancelling" else "expired" if batch.is_over else "completed"
        if batch.output_file_id is None and batch.error_file_id is None:
            ids = [new_id("file-") if num else None for num in (batch.completed, batch.failed)]
            status = batch.status if batch.status == "cancelling" else "finalizing"
            batch = await self._becomes(id, status, output_file_id=ids[0], error_file_id=ids[1])
        named = zip(
            ("output", "error"), (batch.output_file_id, batch.error_file_id), self._store.records(id), strict=True
        )
        for kind, file_id, path in named:
            if file_id is None or file_id in self._files:  # which it is if a process ended just here
                continue
            num_bytes = path.stat().st_size
            now = int(self._clock())
            until = None if batch.output_ttl_s is None else now + batch.output_ttl_s
            file = StoredFile(file_id, num_bytes, now, f"{id}_{kind}.jsonl", OUTPUT, batch.owner, until)
            await self._files.take(path, file)
            self._files.account(batch.owner, -num_bytes)
        if run.failure is not None:
            await self._becomes(id, "failed", errors=(run.failure,))
        else:
            await self._becomes(id, last)
        gone = self._store.forget()
        if gone:
            await asyncio.to_thread(self._store.remove, gone)

    async def _give_up(self, id: str, run: _Run) -> None:
        """Record the unanswered lines of a batch as expired."""
        batch = self._store.now(id)
        done = await asyncio.to_thread(self._store.read_done, id)
        with self._files.path(batch.input_file_id).open("rb") as file:
            lines = self._undone(file, batch, done)
            while run.failure is None and (line := await asyncio.to_thread(next, lines, None)) is not None:
                record = error_record_of(line.custom_id, line.number, BatchOver())
                await self._record(id, run, record, answered=False)
                self._store.set(replace(self._store.now(id), is_over=True))

    # --- its lines ------------------------------------------------------------------------------------------------

    async def _answer_lines(self, id: str, run: _Run, done: BatchSummary) -> None:
        batch = self._store.now(id)
        if self._places is None:
            num_rows = self._lifecycle.require_model().engine.model.max_num_seqs
            self._places = asyncio.Semaphore(self._max_at_work or max(1, num_rows // 4))
        with self._files.path(batch.input_file_id).open("rb") as file:
            lines = self._undone(file, batch, done)
            async with asyncio.TaskGroup() as group:
                while run.goes_on and (line := await asyncio.to_thread(next, lines, None)) is not None:
                    await self._places.acquire()
                    if not await self._there_is_room(run):
                        self._places.release()
                        break
                    group.create_task(self._answer_line(id, run, line))

    def _undone(self, file: BinaryIO, batch: StoredBatch, done: BatchSummary) -> Iterator[_Line]:
        """Yield the lines in `file` that are not in `done`. Runs on a thread."""
        for number, line in lines_of(file, self._limit_bytes):
            custom_id = custom_id_of(line)
            if number in done.numbers or (custom_id is not None and digest(custom_id) in done.custom_ids):
                continue
            try:
                request = read_line(line, self._limit_bytes)
                if request.url != batch.endpoint:
                    raise InvalidRequest(
                        f"the endpoint of this batch is {batch.endpoint}, not {clip(request.url)}", param="url"
                    )
            except ApiError as error:
                yield _Line(number, custom_id, error)
                continue
            yield _Line(number, custom_id, behind_others(request) if self._by_priority else request)

    async def _there_is_room(self, run: _Run) -> bool:
        """Wait until no request waits for the engine and it can run one more sequence. Return False if the batch has to stop."""
        while run.goes_on:
            if self._lifecycle.phase is not LoadPhase.READY:
                run.is_left = True
                break
            engine = self._lifecycle.require_model().engine
            health = engine.health()
            if not health.ok:
                run.is_left = True
                break
            if not health.num_waiting and health.num_running < max(1, engine.model.max_num_seqs - 1):
                return True
            await self._pause()
        return False

    async def _answer_line(self, id: str, run: _Run, line: _Line) -> None:
        assert self._places is not None, "it has a place"
        try:
            if isinstance(line.request, ApiError):
                await self._record(id, run, error_record_of(line.custom_id, line.number, line.request), answered=False)
                return
            answer = await self._answered(run, line.request, partial(_call_of, self._store.now(id).owner))
            if answer is not None:
                record, used = record_of(line.custom_id, answer), UsageCounts.of_answer(answer.body)
                await self._record(id, run, record, answered=answer.status == 200, used=used)
        finally:
            self._places.release()

    async def _answered(self, run: _Run, request: LineRequest, make_call: Callable[[], Call]) -> LineAnswer | None:
        """Return the answer to `request`, or None if the batch is cancelled or this process stops."""
        while await self._there_is_room(run):
            try:
                answer = await self._calls.answer(request, run.gone, make_call)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if run.gone.is_set() and task is not None and not task.cancelling():
                    return None
                raise
            if answer.status < 500 and answer.status != 429:
                return answer
            if answer.status not in (429, 503) and await self._there_is_room(run):
                return answer  # the engine is well: the fault is the line's
            await self._pause()
        return None

    async def _record(
        self, id: str, run: _Run, record: bytes, *, answered: bool, used: UsageCounts = UsageCounts()
    ) -> None:
        try:
            self._files.reserve(self._store.now(id).owner, len(record))
        except StorageFull as error:
            run.failure = _error("storage_full", error.message)
            return
        async with run.writing:
            await asyncio.to_thread(lambda: self._store.append(id, record, answered=answered))
        batch = self._store.now(id)
        num_completed, num_failed = batch.completed + answered, batch.failed + (not answered)
        self._store.set(replace(batch, completed=num_completed, failed=num_failed, usage=batch.usage + used))


def _call_of(owner: str | None) -> Call:
    """Return the Call of a batch line. The prefix cache is that of `owner`; fair scheduling counts all batches as one client."""
    is_admin = owner == ADMINISTRATOR
    key = None if owner is None or is_admin else bytes.fromhex(owner)
    return Call(key=key, is_admin=is_admin, shares_as=CALLER_KEY)


def _error(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
