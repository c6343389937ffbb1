"""batch: a file of requests in OpenAI's batch format, answered into another: `python -m server batch in.jsonl out.jsonl`.

Each line goes to the endpoint it names as an HTTP request would, only without a socket, so its answer and its refusals are
the server's own. The input is read twice, first for its `custom_id`s, and never held: as many lines are in flight as the
engine has rows, and some ahead. An answer is written when it is complete, whole and at once, so what is cut off can be
resumed. Heavy imports wait until options and files are known to be good."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import hashlib
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
from typing import TYPE_CHECKING, Any, BinaryIO

from server.config import ConfigError, ServerConfig, flag_of, log_level, parse
from server.errors import ApiError, BodyTooLarge, InvalidRequest, RouteNotFound, clip

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from server.loaded.lifecycle import Load
    from server.loaded.model import LoadedModel
    from server.offline.progress import Progress

logger = logging.getLogger("oneloop.batch")

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# Flags that would say nothing here. In the environment or a --config file, which a server may share, they are let pass.
_LISTENING = {
    flag_of(spec.name)[2:]
    for spec in dataclasses.fields(ServerConfig)
    if spec.name == "access_log"
    or (spec.metadata["group"] == "HTTP" and spec.name not in ("max_queue", "max_body_size"))
}
LISTENING = frozenset(f"--{no}{name}" for name in _LISTENING for no in ("", "no-"))
LINE_EXTRA_BYTES = 64 * 1024  # of a line around its body
INTERRUPTED = 130

HELP = f"""usage: python -m server batch IN OUT [--resume] [options]

Answer the requests of IN, one JSON object a line in OpenAI's batch format, into OUT; - is standard input or output.

  {{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {{"messages": [...]}}}}

URLs: {", ".join(URLS)}. Answers come in the order in which they are complete.
The exit code is 0 only if every line was answered.

  --resume   keep the answers OUT has, drop its failures, and do what is missing
  options    of model, engine and logging, as in python -m server --help
"""


class BatchError(Exception):
    """The batch cannot begin or go on, and the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the command line asks for. None is standard input or output."""

    source: Path | None
    target: Path | None
    resume: bool
    config: ServerConfig

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Job:
        """Raises ConfigError."""
        paths, options = argv[:2], [word for word in argv[2:] if word != "--resume"]
        if len(paths) < 2 or any(path.startswith("-") and path != "-" for path in paths):
            raise ConfigError("the command is: python -m server batch IN OUT [--resume] [options]")
        source, target = (None if path == "-" else Path(path) for path in paths)
        resume = "--resume" in argv[2:]
        for word in options:
            if (flag := word.partition("=")[0]) in LISTENING:
                raise ConfigError(f"{flag} is for a server that listens; a batch does not")
        if resume and target is None:
            raise ConfigError("--resume needs a file to go on with, not standard output")
        if source is not None and target is not None and source.resolve() == target.resolve():
            raise ConfigError(f"{source} cannot be input and output at once")
        return cls(source, target, resume, parse(options, environ))


def main(argv: Sequence[str], load: Load | None = None) -> int:
    """The exit code: 0 if every line was answered, 1 if not, 2 for options that cannot be honoured. `load`: in place of
    `server.load`, which is imported once options and files are known to be good."""
    if "--help" in argv or "-h" in argv:
        print(HELP, end="")
        return 0
    try:
        job = Job.parse(argv, os.environ)
    except ConfigError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", level=log_level(job.config))
    try:
        with _input(job.source) as source:
            return _run(job, source, load or _loader())
    except BatchError as error:
        print(f"oneloop: {error}", file=sys.stderr)
    except OSError as error:
        print(f"oneloop: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("oneloop: interrupted; --resume goes on from here", file=sys.stderr)
        return INTERRUPTED
    return 1


def _loader() -> Load:
    from server.load import load

    return load


# --- files --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _input(path: Path | None) -> Iterator[BinaryIO]:
    """A file that can be read twice."""
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


def lines_of(file: BinaryIO, limit_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Number and content of every line that is not blank, from the beginning; None for one that is too long to read."""
    file.seek(0)
    number = 0
    while line := file.readline(limit_bytes + 1):
        number += 1
        content = line.removeprefix(codecs.BOM_UTF8).strip() if number == 1 else line.strip()
        too_long = len(line) > limit_bytes
        while line and not line.endswith(b"\n"):
            line = file.readline(limit_bytes + 1)
        if too_long or content:
            yield number, None if too_long else content


def _digest(custom_id: str) -> bytes:
    """A digest in place of the id, which may be long, where millions are remembered."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _custom_id(line: bytes | None) -> str | None:
    """None where the line has none that could be used."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(line or b"")
        found = content.get("custom_id") if isinstance(content, dict) else None
        return found if isinstance(found, str) else None
    return None


def count_lines(file: BinaryIO, limit_bytes: int) -> int:
    """How many requests there are. Raises BatchError where two have the same custom_id."""
    seen: set[bytes] = set()
    num = 0
    for number, line in lines_of(file, limit_bytes):
        num += 1
        custom_id = _custom_id(line)
        if custom_id is None:
            continue
        digest = _digest(custom_id)
        if digest in seen:
            raise BatchError(f"line {number}: custom_id {clip(custom_id)!r} is there twice; nothing was started")
        seen.add(digest)
    return num


def keep_answers(path: Path) -> set[bytes]:
    """Leaves of an earlier output what was answered with 200: digests of those custom_ids. Failures will be tried again, and
    a line that was cut off is no answer."""
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
                finished.add(_digest(custom_id))
    partial.replace(path)
    return finished


# --- one line -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    custom_id: str
    url: str
    body: bytes


def read_line(line: bytes | None, limit_bytes: int) -> Ask:
    """Raises ApiError: nothing but this line is at fault."""
    import msgspec

    if line is None:
        raise BodyTooLarge(limit_bytes)
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        unknown = fields.keys() - {"custom_id", "method", "url", "body"}
        values = {name: msgspec.json.decode(fields[name], type=str) for name in ("custom_id", "method", "url")}
        body = bytes(fields["body"])
    except KeyError as error:
        raise InvalidRequest(f"the line has no {error.args[0]}", param=error.args[0]) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f'the line is no {{"custom_id", "method", "url", "body"}} object: {clip(error)}') from None
    if unknown:
        raise InvalidRequest(f"the line has unknown fields: {clip(', '.join(sorted(unknown)))}")
    if values["method"] != "POST" or values["url"] not in URLS:
        raise RouteNotFound(clip(values["method"]), values["url"])
    with contextlib.suppress(msgspec.MsgspecError):  # what is wrong with the body is the endpoint's to say
        if msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get("stream", b"null") not in (b"null", b"false"):
            raise InvalidRequest("stream is not possible in a batch; leave it out", param="stream")
    return Ask(values["custom_id"], values["url"], body)


@dataclass(slots=True)
class Answer:
    """What the endpoint sent. Status 0: nothing, it was cancelled."""

    status: int = 0
    request_id: str = ""
    body: bytes = b""


async def call(app: ASGIApp, ask: Ask) -> Answer:
    """The answer of `app`, as a client gets it who waits for it to the end."""
    answer = Answer()
    unread = [ask.body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # this client never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.request_id = dict(message["headers"])[b"x-request-id"].decode("latin-1")
        else:
            answer.body += message.get("body", b"")

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ask.body))]
    scope = {"type": "http", "method": "POST", "path": ask.url, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    if not answer.status:
        raise asyncio.CancelledError  # which ends at the outermost layer of the application
    return answer


def record_of(custom_id: str | None, answer: Answer) -> bytes:
    import orjson

    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": orjson.Fragment(answer.body),
    }
    id = "batch_req_" + answer.request_id
    return orjson.dumps({"id": id, "custom_id": custom_id, "response": response, "error": None}) + b"\n"


def error_record_of(custom_id: str | None, number: int, error: ApiError) -> bytes:
    """The record of a line that never became a request."""
    complaint = {
        "code": error.code or "invalid_line",
        "message": f"line {number}: {error.message}",
        "param": error.param,
    }
    record = {"id": f"batch_req_line_{number}", "custom_id": custom_id, "response": None, "error": complaint}
    return json.dumps(record).encode() + b"\n"


# --- all of them --------------------------------------------------------------------------------------------------


def _run(job: Job, source: BinaryIO, load: Load) -> int:
    limit = job.config.max_body_size + LINE_EXTRA_BYTES
    total = count_lines(source, limit)
    done: set[bytes] = set()
    if job.target is not None and job.target.is_file() and job.target.stat().st_size:
        if not job.resume:
            raise BatchError(f"{job.target} has content; --resume goes on with it, or name another file")
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
    from server.loaded.lifecycle import Lifecycle, LoadError
    from server.offline.progress import Progress
    from server.service import Service
    from server.terminal import StartupDisplay

    display, cancel = StartupDisplay(sys.stderr), threading.Event()
    try:
        served = await load(config, display.report, cancel)
    except LoadError as error:
        raise BatchError(str(error)) from None
    finally:
        cancel.set()
        display.finish()
    lifecycle = Lifecycle()
    lifecycle.ready(served)
    # No header would name what is ignored, and nobody comes back for what is stored.
    service = Service(dataclasses.replace(config, strict_fields=True, max_stored_responses=0), lifecycle)
    progress = Progress(total, "line", shown=None)
    try:
        batch = Batch(service_apps(service), served, progress, target, config.max_body_size + LINE_EXTRA_BYTES)
        await batch.answer(lines, done)
    finally:
        progress.close()
        service.offload.close()
        await served.engine.close()
    print(batch.summary(), file=sys.stderr)
    return 1 if progress.num_failed else 0


def service_apps(service: Any) -> dict[str, ASGIApp]:
    """The endpoints a line may name, with the layer that makes answers of errors; keys and origins are a network's matter."""
    from server.app import Endpoint, routes_of
    from server.http.middleware import RequestMiddleware

    return {
        path: RequestMiddleware(Endpoint(path, handler, service), stats=service.http_stats, access_log=False)
        for _, path, handler in routes_of(service.config)
        if path in URLS
    }


class Batch:
    """Lines to answers, a bounded number at a time. `target` gets whole lines only."""

    def __init__(
        self, apps: Mapping[str, ASGIApp], served: LoadedModel, progress: Progress, target: BinaryIO, limit_bytes: int
    ) -> None:
        self._apps = apps
        self._engine = served.engine
        self._progress = progress
        self._target = target
        self._limit_bytes = limit_bytes
        self._num_active = 0  # lines the engine may be working on
        self._one_ended = asyncio.Event()
        self._num_skipped = 0

    async def answer(self, lines: Iterator[tuple[int, bytes | None]], done: set[bytes]) -> None:
        """Raises BatchError when the engine is dead, OSError where the target cannot be written."""
        rows = self._engine.model.max_num_seqs

        async def work() -> None:
            for number, line in lines:
                custom_id = _custom_id(line)
                if custom_id is not None and _digest(custom_id) in done:
                    self._num_skipped += 1
                    self._progress.done(0)
                else:
                    await self._one(number, custom_id, line)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(rows + max(4, rows // 4)):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _one(self, number: int, custom_id: str | None, line: bytes | None) -> None:
        try:
            ask = read_line(line, self._limit_bytes)
        except ApiError as error:
            self._write(error_record_of(custom_id, number, error))
            self._progress.done(0, failed=True)
            return
        answer = await self._answer_when_there_is_room(ask)
        health = self._engine.health()
        if answer.status >= 500 and not health.ok:
            raise BatchError(f"the engine has failed ({health.reason}); --resume goes on from here")
        self._write(record_of(custom_id, answer))
        self._progress.done(_num_tokens(answer), failed=answer.status != 200)

    async def _answer_when_there_is_room(self, ask: Ask) -> Answer:
        """A line of many sequences may find the queue full, and then waits for another line to end."""
        while True:
            self._num_active += 1
            try:
                answer = await call(self._apps[ask.url], ask)
            finally:
                self._num_active -= 1
            if answer.status != 429 or not self._num_active:
                self._one_ended.set()
                self._one_ended = asyncio.Event()
                return answer
            await self._one_ended.wait()

    def _write(self, record: bytes) -> None:
        self._target.write(record)
        self._target.flush()

    def summary(self) -> str:
        progress = self._progress
        answered = progress.num_done - progress.num_failed - self._num_skipped
        skipped = f", {self._num_skipped} were there" if self._num_skipped else ""
        return (
            f"oneloop: {answered} answered, {progress.num_failed} failed{skipped}; {progress.num_tokens} tokens "
            f"in {progress.elapsed_s:.1f} s, {progress.tokens_per_s:.1f} tok/s"
        )


def _num_tokens(answer: Answer) -> int:
    if answer.status != 200:
        return 0
    usage = json.loads(answer.body)["usage"]
    return int(usage["output_tokens" if "output_tokens" in usage else "completion_tokens"])
