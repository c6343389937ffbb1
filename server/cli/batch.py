"""batch: answer a file of requests in OpenAI's batch format: `python -m server batch in.jsonl out.jsonl`.

Each line is passed to its endpoint like an HTTP request, without a socket, so results and errors are the server's own. The input
is read twice, first to count lines, and is never held in memory. Slightly more lines are in flight than sequences fit in a step.
An invalid line fails alone. If two lines have the same custom_id, the later line is invalid. A result is written when it is
complete, so an interrupted run can be resumed. Heavy modules are imported after options and files are validated."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from server.batches.lines import (
    LINE_EXTRA_BYTES,
    URLS,
    LineAnswer,
    LineCalls,
    custom_id_of,
    digest,
    error_record_of,
    lines_of,
    read_line,
    record_of,
)
from server.config.command_line import CommandParser, add_options
from server.config.option import options_by_name
from server.config.parse import config_of
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError, flag_of
from server.http import logs
from server.http.errors import ApiError, InvalidRequest

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from server.llm.progress import Progress
    from server.models.lifecycle import Load
    from server.models.model import LoadedModel

logger = logging.getLogger("oneloop.batch")

# Flags that would say nothing here. In the environment or a --config file, which a server may share, they are let pass.
_LISTENING = {
    flag_of(spec.name)[2:]
    for spec in dataclasses.fields(ServerConfig)
    if spec.name == "access_log"
    or (spec.metadata["group"] == "HTTP" and spec.name not in ("max_queue", "max_body_size"))
}
LISTENING = frozenset(f"--{no}{name}" for name in _LISTENING for no in ("", "no-"))
INTERRUPTED = 130
_TWICE = "an earlier line has the same custom_id; each line needs its own"

HELP = f"""usage: oneloop batch IN OUT [--resume] [options]

Answer the requests of IN, one JSON object a line in OpenAI's batch format, into OUT; - is standard input or output.

  {{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {{"messages": [...]}}}}

URLs: {", ".join(URLS)}. Answers are written in the order of their completion.
The exit code is 0 only if every line was answered.

  --resume   keep the answers in OUT, remove its errors, and answer the other lines
  options    of model, engine and logging, as in oneloop --help
"""


class BatchFailure(Exception):
    """Error: the batch cannot start or continue. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Arguments of a batch. `source`, `target`: input and output file, None for standard input or output."""

    source: Path | None
    target: Path | None
    resume: bool
    config: ServerConfig

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Parse the command's arguments. Raises ConfigError."""
        parser = CommandParser(
            prog="oneloop batch", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
        parser.add_argument("paths", nargs="*")
        parser.add_argument("--resume", action="store_true", default=False)
        add_options(parser, options_by_name())
        given = parser.read(argv)
        paths, resume = given.pop("paths", ()), given.pop("resume")
        if len(paths) != 2:
            raise ConfigError("the command is: oneloop batch IN OUT [--resume] [options]")
        source, target = (None if path == "-" else Path(path) for path in paths)
        for word in argv:
            if (flag := word.partition("=")[0]) in LISTENING:
                raise ConfigError(f"{flag} applies to oneloop serve only")
        if resume and target is None:
            raise ConfigError("--resume needs an output file, not standard output")
        if source is not None and target is not None and source.resolve() == target.resolve():
            raise ConfigError(f"IN and OUT are both {source}; use different files")
        return cls(source, target, resume, config_of(given, environ).of_one_model("a file of requests"))


def main(argv: Sequence[str], load: Load | None = None) -> int:
    """Answer the batch. Return the exit code: 0 if every line was answered, 1 if not, 2 for invalid options. `load`: replaces
    `server.process.load`, which is imported only after options and files are validated."""
    if "--help" in argv or "-h" in argv:
        print(HELP, end="")
        return 0
    try:
        job = BatchJob.parse(argv, os.environ)
    except ConfigError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 2
    logs.begin(job.config.log_level, job.config.log_format)
    try:
        with _input(job.source) as source:
            return _run(job, source, load or _loader())
    except BatchFailure as error:
        print(f"oneloop: {error}", file=sys.stderr)
    except OSError as error:
        print(f"oneloop: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("oneloop: interrupted; continue with --resume", file=sys.stderr)
        return INTERRUPTED
    return 1


def _loader() -> Load:
    from server.process.load import load

    return load


# --- files --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _input(path: Path | None) -> Iterator[BinaryIO]:
    """Yield the input as a file that can be read twice."""
    if path is not None:
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        yield file


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[BinaryIO]:
    if path is None:
        yield sys.stdout.buffer
        return
    with path.open("ab") as file:
        yield file


def keep_answers(path: Path) -> set[bytes]:
    """Remove failed and incomplete lines from an earlier output, so that they are tried again. Return the digests of the
    custom_ids of the remaining lines, which have status 200."""
    finished: set[bytes] = set()
    partial = path.with_name(path.name + ".resume")
    with path.open("rb") as old, partial.open("wb") as new:
        for line in old:
            try:
                record = json.loads(line)
                custom_id, answered = record["custom_id"], record["response"]["status_code"] == 200
            except (ValueError, TypeError, KeyError):
                continue
            if answered and line.endswith(b"\n") and isinstance(custom_id, str):
                new.write(line)
                finished.add(digest(custom_id))
    partial.replace(path)
    return finished


# --- all of them --------------------------------------------------------------------------------------------------


def _run(job: BatchJob, source: BinaryIO, load: Load) -> int:
    limit = job.config.max_body_size + LINE_EXTRA_BYTES
    total = sum(1 for _ in lines_of(source, limit))
    done: set[bytes] = set()
    if job.target is not None and job.target.is_file() and job.target.stat().st_size:
        if not job.resume:
            raise BatchFailure(f"{job.target} is not empty: continue it with --resume, or name another file")
        done = keep_answers(job.target)
    import uvloop

    with _output(job.target) as target, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_answer_all(job.config, lines_of(source, limit), total, done, target, load))


async def _answer_all(
    config: ServerConfig,
    lines: Iterator[tuple[int, bytes | None]],
    total: int,
    done: set[bytes],
    target: BinaryIO,
    load: Load,
) -> int:
    from server.api.service import Service
    from server.http.offload import Offload
    from server.llm.progress import Progress
    from server.media.limits import UNBOUNDED_GB
    from server.models.lifecycle import Lifecycle, LoadError
    from server.process.app import line_apps
    from server.process.terminal import StartupDisplay

    display, cancel = StartupDisplay(sys.stderr), threading.Event()
    try:
        config = dataclasses.replace(config, max_media_memory_gb=UNBOUNDED_GB)
        loaded = await load(config, display.report, cancel)
    except LoadError as error:
        raise BatchFailure(str(error)) from None
    finally:
        cancel.set()
        display.finish()
    lifecycle = Lifecycle()
    lifecycle.ready(loaded)
    service = Service(config, lifecycle, Offload(max_waiting=sys.maxsize))
    progress = Progress(total, "line", shown=None)
    try:
        batch = Batch(line_apps(service), loaded, progress, target, config.max_body_size + LINE_EXTRA_BYTES)
        await batch.answer(lines, done)
    finally:
        progress.close()
        service.offload.close()
        await loaded.engines.close()
    print(batch.summary(), file=sys.stderr)
    return 1 if progress.num_failed else 0


class Batch:
    """Executor of batch lines. The number of lines at a time is limited. `target` receives complete lines only."""

    def __init__(
        self, apps: Mapping[str, ASGIApp], loaded: LoadedModel, progress: Progress, target: BinaryIO, limit_bytes: int
    ) -> None:
        self._calls = LineCalls(apps)
        self._engine = loaded.engine
        self._progress = progress
        self._target = target
        self._limit_bytes = limit_bytes
        self._num_skipped = 0

    async def answer(self, lines: Iterator[tuple[int, bytes | None]], done: set[bytes]) -> None:
        """Answer lines whose custom_id is not in `done`. Raises BatchError if the engine has failed, OSError if writing fails."""
        from server.http.watch import gather_or_cancel

        rows = self._engine.model.max_num_seqs
        seen: set[bytes] = set()

        async def work() -> None:
            for number, line in lines:
                custom_id = custom_id_of(line)
                key = None if custom_id is None else digest(custom_id)
                if key is not None and key in seen:
                    self._refuse(number, custom_id, InvalidRequest(_TWICE, param="custom_id"))
                    continue
                if key is not None:
                    seen.add(key)
                if key in done:
                    self._num_skipped += 1
                    self._progress.done(0)
                else:
                    await self._one(number, custom_id, line)

        await gather_or_cancel(work() for _ in range(rows + max(4, rows // 4)))

    async def _one(self, number: int, custom_id: str | None, line: bytes | None) -> None:
        try:
            request = read_line(line, self._limit_bytes)
        except ApiError as error:
            self._refuse(number, custom_id, error)
            return
        answer = await self._calls.answer(request)
        health = self._engine.health()
        if answer.status >= 500 and not health.ok:
            raise BatchFailure(f"the engine has failed ({health.reason}); continue with --resume")
        self._write(record_of(custom_id, answer))
        self._progress.done(_num_tokens(answer), failed=answer.status != 200)

    def _refuse(self, number: int, custom_id: str | None, error: ApiError) -> None:
        self._write(error_record_of(custom_id, number, error))
        self._progress.done(0, failed=True)

    def _write(self, record: bytes) -> None:
        self._target.write(record)
        self._target.flush()

    def summary(self) -> str:
        progress = self._progress
        answered = progress.num_done - progress.num_failed - self._num_skipped
        skipped = f", {self._num_skipped} answered earlier" if self._num_skipped else ""
        return (
            f"oneloop: {answered} answered, {progress.num_failed} failed{skipped}; {progress.num_tokens} tokens "
            f"in {progress.elapsed_s:.1f} s, {progress.tokens_per_s:.1f} tok/s"
        )


def _num_tokens(answer: LineAnswer) -> int:
    if answer.status != 200:
        return 0
    usage = json.loads(answer.body)["usage"]
    return int(usage["output_tokens" if "output_tokens" in usage else "completion_tokens"])
