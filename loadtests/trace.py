"""Recorded traces for replay: arrival times, lengths and shared prefixes of a server's requests, read from JSONL.

A line is a request in Mooncake's format: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and optional
`hash_ids`. There is one hash id per 512 prompt tokens; equal ids mean equal text."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from loadtests.answers import Endpoint
from loadtests.arrivals import Replay
from loadtests.conversations import body_of

BLOCK_TOKENS = 512
_FIRST_ID = 100  # above the usual special tokens


class BadTrace(ValueError):
    """Error: a line of a trace is not a valid request."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Request of a trace. `blocks`: hash ids of its prompt's blocks of `BLOCK_TOKENS` tokens (the last may be shorter)."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """Prompts of random token ids with the lengths and shared blocks of a trace."""

    recorded: tuple[Recorded, ...]
    vocab_size: int = 49_152
    num_turns: ClassVar[int] = 1
    endpoints: ClassVar[tuple[Endpoint, ...]] = ("completions",)
    withholds: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.vocab_size <= _FIRST_ID:
            raise ValueError(f"the vocabulary must be larger than {_FIRST_ID}")

    def describe(self) -> str:
        return f"a trace of {len(self.recorded)} requests"

    def arrivals(self, speed: float = 1.0) -> Replay:
        """Return the recorded arrival times divided by `speed`. Raises ValueError."""
        if not 0 < speed < float("inf"):
            raise ValueError("the speed of a trace must be positive and finite")
        return Replay(tuple((each.at_s - self.recorded[0].at_s) / speed for each in self.recorded))

    def scripts(self, seed: int, lengths: Sequence[int], fields: Mapping[str, Any]) -> list[bytes]:
        return [
            body_of({"max_tokens": length, **fields, "prompt": self._ids(index, seed)})
            for index, length in enumerate(lengths)
        ]

    def _ids(self, index: int, seed: int) -> list[int]:
        """Return the token ids of the prompt `index`. A block depends on its hash id only. The rest is not shared."""
        each, ids = self.recorded[index], range(_FIRST_ID, self.vocab_size)
        prompt: list[int] = []
        for block in each.blocks:
            prompt += random.Random(f"{seed} {block}").choices(ids, k=BLOCK_TOKENS)
        rest = max(0, each.num_prompt_tokens - len(prompt))
        own = random.Random(f"{seed} own {index}").choices(ids, k=rest)
        return (prompt + own)[: each.num_prompt_tokens]


def read_trace(path: Path, vocab_size: int = 49_152, max_requests: int | None = None) -> TracePrompt:
    """Return the first `max_requests` requests of a file, sorted by arrival time. Raises BadTrace, OSError."""
    recorded = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                recorded.append(_recorded(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                why = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise BadTrace(f"{path}, line {number}: {why}") from None
    if not recorded:
        raise BadTrace(f"{path} has no requests")
    recorded.sort(key=lambda each: each.at_s)
    return TracePrompt(tuple(recorded[:max_requests]), vocab_size)


def _recorded(line: Mapping[str, Any]) -> Recorded:
    at_s, num_prompt, num_output = float(line["timestamp"]) / 1000, line["input_length"], line["output_length"]
    if not 0 <= at_s < float("inf") or not all(isinstance(each, int) and each > 0 for each in (num_prompt, num_output)):
        raise ValueError("a request has a timestamp, and at least one token of prompt and of answer")
    blocks = tuple(int(block) for block in line.get("hash_ids") or ())
    if len(blocks) > -(-num_prompt // BLOCK_TOKENS):
        raise ValueError(
            f"{len(blocks)} hash_ids are too many for {num_prompt} tokens, of which each is {BLOCK_TOKENS}"
        )
    return Recorded(at_s, num_prompt, num_output, blocks)
