"""Trace: adds this project's events to a trace file of torch's profiler (Chrome's trace format), and compresses it.

The file is never parsed: it may have hundreds of megabytes, and parsing would block other threads."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runtime.api import StepRecord
from runtime.profiling.stacks import ObservedCall

PROCESS = 1 << 30  # process id of our own tracks, above torch's; no process has it
PYTHON_TRACK = 1
HEAD_BYTES = 1 << 16  # torch's metadata precedes its events in the file
PIECE_BYTES = 1 << 20
_BASE = re.compile(rb'"baseTimeNanoseconds":\s*(\d+)')
_EVENTS = re.compile(rb'"traceEvents":\s*\[')


class NoTrace(ValueError):
    """Error: torch wrote a file that is not a trace in the expected format."""


def write(
    path: Path, torch_trace: Path, calls: Sequence[ObservedCall], steps: Sequence[StepRecord], epoch_ns: int
) -> None:
    """Write a gzipped trace to `path`: `torch_trace`, `calls` and `steps`. `epoch_ns`: wall time at 0 of the monotonic clock.

    Raises OSError or NoTrace, without leaving a file."""
    beside = path.with_name(path.name + ".part")
    try:
        with torch_trace.open("rb") as source, gzip.open(beside, "wb", compresslevel=3) as out:
            head = source.read(HEAD_BYTES)
            base, start = _BASE.search(head), _EVENTS.search(head)
            if start is None:
                raise NoTrace("torch's profiler wrote a file without events")
            out.write(head[: start.end()])
            for event in _events(calls, steps, epoch_ns, 0 if base is None else int(base[1])):
                out.write(json.dumps(event).encode() + b",\n")
            out.write(head[start.end() :])
            while piece := source.read(PIECE_BYTES):
                out.write(piece)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _events(
    calls: Sequence[ObservedCall], steps: Sequence[StepRecord], epoch_ns: int, base_ns: int
) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace. Their times count from `base_ns`."""
    yield _named("process_name", 0, {"name": "oneloop"})
    yield _named("process_sort_index", 0, {"sort_index": -1})
    yield _named("thread_name", PYTHON_TRACK, {"name": "event loop, Python (sampled)"})
    for call in calls:
        yield {
            "ph": "X", "cat": "python", "name": call.name, "pid": PROCESS, "tid": PYTHON_TRACK,
            "ts": (call.began_ns - base_ns) / 1000, "dur": (call.ended_ns - call.began_ns) / 1000,
        }  # fmt: skip
    for step in steps:  # several may be in flight at a time
        common = {"cat": "step", "name": _name(step), "pid": PROCESS, "tid": PYTHON_TRACK, "id": step.number}
        yield {**common, "ph": "b", "ts": _us(step.launched_s, epoch_ns, base_ns), "args": step._asdict()}
        yield {**common, "ph": "e", "ts": _us(step.settled_s, epoch_ns, base_ns)}


def _us(at_s: float, epoch_ns: int, base_ns: int) -> float:
    return (at_s * 1e9 + epoch_ns - base_ns) / 1000


def _name(step: StepRecord) -> str:
    parts = [f"{step.num_prompt_tokens} prompt tokens"] if step.num_prompt_tokens else []
    parts += [f"{step.num_decodes} decodes"] if step.num_decodes else []
    return f"step {step.number}: {', '.join(parts)}{' (graph)' if step.was_captured else ''}"


def _named(kind: str, track: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "ts": 0, "args": args}
