"""The life of the process: the port opens first, signals end it in order, and nothing is left behind.

The orderly ends run in the test's own loop with real signals to ourselves; the abrupt ones in a child process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from runtime.api import FinishReason, LoadProgress
from server.config.server_config import ServerConfig
from server.models.defaults import sampling_defaults
from server.models.lifecycle import LoadError
from server.models.model import LoadedModel
from server.process.listening import listen
from server.process.serve import Process
from tests.fakes import FakeEngine, fake_model
from tests.server.conftest import MESSAGES, Running
from tests.server.tiny import EOS, VOCAB_SIZE, chatml, loaded_model
from tests.tiers import on_push

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


class Life:
    """A Process in this loop whose model loads when the test says so."""

    def __init__(self, tokenizer, clock=time.monotonic, **options) -> None:
        ids = [*tokenizer.encode("Hello"), EOS]
        model = fake_model(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
        self.engine = FakeEngine(lambda request: ids, model=model, paused=True)
        self.loaded = loaded_model(self.engine, tokenizer, chatml(tokenizer), sampling_defaults(), ("tiny",))
        self.load_now: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
        sock = listen("127.0.0.1", 0)
        self.process = Process(ServerConfig(**options), sock, self._load, time.monotonic(), clock)
        self.client = Running(self.process._service, self.engine, tokenizer, sock.getsockname()[1])
        self.running = asyncio.create_task(self.process.run())

    async def _load(self, config, report, cancel) -> LoadedModel:
        report(LoadProgress("weights", 1, 4, "tensors"))
        return await self.load_now

    async def status(self) -> str:
        return (await self.client.http.get("/health")).json()["status"]

    async def until(self, status: str) -> None:
        while await self.status() != status:
            assert not self.running.done(), self.running.result()

    async def ready(self) -> None:
        self.load_now.set_result(self.loaded)
        await self.until("ok")


@pytest.fixture
async def live(tokenizer):
    lives = []

    def start(**options) -> Life:
        lives.append(Life(tokenizer, **options))
        return lives[-1]

    yield start
    for life in lives:
        await life.client.leave()
        if not life.running.done():
            life.running.cancel()
            await asyncio.wait([life.running])
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_the_port_answers_before_the_model_is_there(live, capsys):
    life = live()
    assert await life.status() == "loading"
    assert (await life.client.chat()).status_code == 503
    await life.ready()
    out = capsys.readouterr()
    for word in (
        "tiny",
        "FakeForCausalLM",
        "float32 on cpu",
        "4.0 sequences of 4,096 tokens; prefix caching on",
        "/v1/chat/completions",
    ):
        assert word in out.out
    assert f"http://127.0.0.1:{life.client.port}" in out.out
    assert "weights" in out.err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LoadError("model.safetensors is truncated"), ["oneloop: model.safetensors is truncated"]),
        (ZeroDivisionError("bug"), ["oneloop: ZeroDivisionError: bug"]),
    ],
)
async def test_a_model_that_cannot_load_ends_the_process_with_1_and_says_why(live, capsys, error, words):
    life = live()
    assert await life.status() == "loading"
    life.load_now.set_exception(error)
    assert await life.running == 1
    for word in words:
        assert word in capsys.readouterr().err


async def test_a_signal_that_comes_twice_in_a_moment_is_one_and_a_later_one_the_second(live, monkeypatch):
    left, times, now_s, seen = [], [5.0, 5.15, 5.3], 0.0, 0

    def clock() -> float:
        nonlocal seen
        seen += threading.current_thread() is threading.main_thread()  # the watch asks as well
        return now_s

    monkeypatch.setattr("server.process.serve.leave_at_once", lambda code, why: left.append((code, why)))
    life = live(clock=clock)
    await life.ready()
    stream = await life.client.open_stream(CHAT, messages=MESSAGES, stream=True)
    for number, time_s in enumerate(times, start=1):
        now_s = time_s
        os.kill(os.getpid(), signal.SIGTERM)
        while seen < number:
            await life.until("draining")
        assert left == [(128 + signal.SIGTERM, "stopped by a second signal")] * (number == 3)
    assert not life.running.done()
    life.engine.step(6)
    await stream.head()
    assert await life.running == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_finishes_what_is_in_flight_while_the_socket_still_answers(live, number):
    life = live()
    await life.ready()
    stream = await life.client.open_stream(CHAT, messages=MESSAGES, stream=True)
    whole = asyncio.create_task(life.client.chat())
    await life.engine.until(lambda: len(life.engine.live) == 2)
    os.kill(os.getpid(), number)
    await life.until("draining")
    refused = await life.client.complete()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert not life.running.done()
    life.engine.step(6)
    await stream.head()
    assert b"".join(await stream.chunks()).endswith(b"data: [DONE]\n\n")
    assert (await whole).json()["choices"][0]["message"]["content"] == "Hello"
    assert await life.running == 0
    assert life.engine.closed
    with pytest.raises(httpx.ConnectError):
        await life.status()


async def test_what_passes_the_drain_timeout_is_aborted_and_says_so(live):
    life = live(drain_timeout=0.05)
    await life.ready()
    stream = await life.client.open_stream(CHAT, messages=MESSAGES, stream=True)
    whole = asyncio.create_task(life.client.chat())
    await life.engine.until(lambda: len(life.engine.live) == 2)
    life.engine.step()
    os.kill(os.getpid(), signal.SIGTERM)
    await stream.head()
    body = b"".join(await stream.chunks())
    assert b'"finish_reason":"abort"' in body
    assert body.endswith(b"data: [DONE]\n\n")
    # Half an answer would pass for a whole one.
    assert (await whole).status_code == 503
    assert await life.running == 0
    assert [reason for _, reason in life.engine.ended] == [FinishReason.ABORT] * 2


async def test_an_idle_server_ends_at_once(live):
    life = live(drain_timeout=600)
    await life.ready()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await life.running == 0


async def test_the_first_ctrl_c_is_answered_at_any_log_level(live, capsys):
    life = live(drain_timeout=600, log_level="error")
    await life.ready()
    os.kill(os.getpid(), signal.SIGINT)
    assert await life.running == 0
    told = "oneloop: shutting down: 0 running and 0 waiting requests have up to 600 s; Ctrl-C again ends at once\n"
    assert told in capsys.readouterr().err


async def test_a_reader_that_does_not_read_cannot_hold_up_the_end(live, tokenizer):
    life = live(drain_timeout=0.05)
    long = [*tokenizer.encode("x" * 100_000), EOS]
    life.engine.model = fake_model(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}), max_model_len=200_000)
    life.engine.script = lambda request: long
    await life.ready()
    stream = await life.client.open_stream(CHAT, messages=MESSAGES, stream=True)
    await life.engine.until(lambda: bool(life.engine.live))
    await stream.head()
    while life.engine.live:
        life.engine.step()
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await life.running == 0


async def test_no_thread_is_left_behind(live):
    before = set(threading.enumerate())
    life = live()
    await life.ready()
    await life.client.complete(prompt="x" * 10_000)  # goes to the pool
    os.kill(os.getpid(), signal.SIGTERM)
    assert await life.running == 0
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("oneloop")]
    for thread in left:
        thread.join()
    assert not any(thread.is_alive() for thread in left)


# --- in a process of its own --------------------------------------------------------------------------------------


@contextmanager
def started(*arguments: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process, which does not outlive the block, and its port."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fake_server", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env},
    ) as child:  # fmt: skip
        assert child.stdout is not None
        try:
            yield child, int(child.stdout.readline())
        finally:
            child.kill()


def until(port: int, status: str) -> None:
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=None).json()["status"] == status:
                return
        except httpx.TransportError:
            continue


def test_a_signal_while_loading_ends_at_once_and_takes_the_children_along():
    with started("--fake", "loads-forever") as (child, port):
        until(port, "loading")
        grandchild = int(child.stdout.readline().split()[-1])
        child.send_signal(signal.SIGTERM)
        assert child.wait() == 0
        # Killed and adopted by init, or about to be reaped: in any case not running.
        state = Path(f"/proc/{grandchild}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.nightly
def test_the_second_signal_ends_at_once_whatever_is_in_flight():
    with started("--fake", "paused", "--drain-timeout", "600") as (child, port):
        until(port, "ok")
        with httpx.stream(
            "POST", f"http://127.0.0.1:{port}{CHAT}", json={"messages": MESSAGES, "stream": True}, timeout=None
        ) as response:
            assert response.status_code == 200
            child.send_signal(signal.SIGINT)
            until(port, "draining")
            child.send_signal(signal.SIGTERM)  # the same one could come within the moment in which it counts once
            assert child.wait() == 128 + signal.SIGTERM


def until_it_says(child: subprocess.Popen[str], word: str) -> None:
    assert child.stdout is not None
    while line := child.stdout.readline():
        if word in line:
            return
    raise AssertionError(f"it never said {word}")


def test_an_engine_that_can_never_serve_again_ends_the_process_with_a_code_of_its_own_and_a_last_line():
    with started("--fake", "dies") as (child, port):
        until(port, "ok")
        with httpx.stream(
            "POST", f"http://127.0.0.1:{port}{CHAT}", json={"messages": MESSAGES, "stream": True}, timeout=None
        ) as response:
            assert "server_error" in response.read().decode()
        assert child.wait() == 70
        last = child.stdout.read().splitlines()[-1]
        assert last == "oneloop: the device cannot compute any more: OutOfOrder; restart the server"


@pytest.mark.parametrize(("fake", "code"), [("hanging-thread", 0), ("hanging-step", 71)], ids=["a thread", "a step"])
def test_the_process_ends_when_asked_whatever_hangs(fake, code):
    with started("--fake", fake) as (child, port):
        until(port, "ok")
        child.send_signal(signal.SIGTERM)
        assert child.wait() == code


@pytest.mark.parametrize(
    ("signals", "codes"),
    [([signal.SIGTERM], {71}), ([signal.SIGTERM, signal.SIGINT], {130, 143})],  # in either order
)
def test_the_process_ends_when_asked_though_its_event_loop_hangs(signals, codes):
    options = ("--drain-timeout", "0" if len(signals) == 1 else "600")
    with started("--fake", "hanging-loop", *options, TEST_LIMIT_S="0") as (child, port):
        until(port, "ok")
        with pytest.raises(httpx.TransportError):  # nobody will answer
            httpx.post(
                f"http://127.0.0.1:{port}{CHAT}", json={"messages": MESSAGES}, timeout=httpx.Timeout(None, read=0.01)
            )
        until_it_says(child, "hangs")
        for number in signals:
            child.send_signal(number)
        assert child.wait() in codes
        assert child.stdout.read().splitlines()[-1].startswith("oneloop: ")


async def test_an_engine_that_dies_while_it_drains_ends_the_process_all_the_same(live):
    life = live(drain_timeout=3600)
    await life.ready()
    whole = asyncio.create_task(life.client.chat())
    await life.engine.until(lambda: bool(life.engine.live))
    os.kill(os.getpid(), signal.SIGTERM)
    await life.until("draining")
    life.engine.die("no device")
    assert (await whole).status_code == 500
    assert await life.running == 70


def test_a_port_in_use_is_said_in_one_line_and_ends_with_1():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-m", "server", "--port", str(port)], cwd=ROOT, capture_output=True, text=True
        )
    assert ended.returncode == 1
    assert ended.stderr == f"oneloop: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["--verbose"],
            0,
            ["smollm2-135m-instruct", "LlamaForCausalLM", "own kernels", "ArceeForCausalLM", "transformers package"],
        ),
        pytest.param(["--help"], 0, ["usage: oneloop models"], marks=pytest.mark.nightly),
        pytest.param(["llama"], 2, ["usage: oneloop models"], marks=pytest.mark.nightly),
    ],
)
def test_models_lists_what_can_be_served_and_what_computes_it(arguments, code, words):
    ended = subprocess.run(
        [sys.executable, "-m", "server", "models", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == code
    listed = " ".join((ended.stderr if code else ended.stdout).split())
    for word in words:
        assert word in listed


@pytest.mark.parametrize(
    ("options", "code", "words"),
    on_push(
        [
            (["--model", "/no/such/folder"], 2, ["/no/such/folder", "no such file or folder"]),
            (["--model", "smollm2"], 2, ["smollm2", "did you mean"]),
            (["--model", "tests"], 2, ["tests: no config.json in this folder"]),
            (["--model", "/no/such/folder", "--dry-run"], 2, ["no such file or folder"]),
            (["--host", "no.such.host.invalid"], 1, ["no.such.host.invalid"]),
        ],
        (["--model", "smollm2"], 2, ["smollm2", "did you mean"]),
    ),
)
def test_what_cannot_be_served_is_said_without_a_traceback_before_torch_is_imported(options, code, words):
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "server", "--port", "0", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert re.search(r"\| +server\.config\.parse$", ended.stderr, re.MULTILINE)
    assert not re.search(r"\| +torch$", ended.stderr, re.MULTILINE)
    for word in words:
        assert word in ended.stderr
