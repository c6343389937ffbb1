"""`python -m server` as a user has it: a process on a port, real weights. Imports nothing of ours, so that it also runs against an
installed wheel from outside the source tree."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence

import openai
import pytest


class Server:
    """A server process with its log; `stop` must leave nothing behind."""

    def __init__(self, *args: str, command: Sequence[str] = (), **env: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server", *command, "--port", str(self.port), *args],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env},
        )  # fmt: skip
        self.log: list[str] = []
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stdout or ()), daemon=True)
        self._reader.start()

    def get(self, path: str) -> tuple[int, dict]:
        try:
            with urllib.request.urlopen(self.base + path) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_until_healthy(self) -> list[tuple[int, dict]]:
        """Every answer of /health on the way, the 200 last."""
        answers: list[tuple[int, dict]] = []
        while True:  # the first start downloads the model; a hang is the test's to end
            assert self.process.poll() is None, "".join(self.log)
            try:
                answers.append(self.get("/health"))
            except OSError:
                time.sleep(0.02)  # the port is not open yet
                continue
            if answers[-1][0] == 200:
                return answers
            time.sleep(0.02)

    def wait_until_said(self, words: str) -> str:
        """The line of the log that has them."""
        seen = 0
        while True:
            for line in self.log[seen:]:
                if words in line:
                    return line
                seen += 1
            assert self.process.poll() is None, "".join(self.log)
            time.sleep(0.02)

    def post(self, path: str, body: object) -> tuple[int, dict]:
        ask = urllib.request.Request(self.base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(ask) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base + "/v1", api_key="none", max_retries=0)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One for all who change nothing about it."""
    running = Server()
    try:
        running.wait_until_healthy()
        yield running
    finally:
        running.kill()


@pytest.fixture(scope="session")
def embedder() -> Iterator[Server]:
    """A server of the built-in model that embeds."""
    running = Server("--model", "all-minilm-l6-v2")
    try:
        running.wait_until_healthy()
        yield running
    finally:
        running.kill()


def _starting() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def begin(*args: str, **env: str) -> Server:
        started.append(Server(*args, **env))
        return started[-1]

    yield begin
    for server in started:
        server.kill()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """`start("--option", "value", ENVIRONMENT="x")`: a server of its own, which may still be loading."""
    yield from _starting()


@pytest.fixture(scope="module")
def start_for_module() -> Iterator[Callable[..., Server]]:
    """`start`, for as long as the tests of a file run."""
    yield from _starting()
