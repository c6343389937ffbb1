"""Serving at a path: the same over a Unix socket, for whoever may write to it, and what a start does with a file it finds."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from server.config.parse import parse
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from server.process.app import allowed_hosts
from server.process.listening import listen_at
from server.process.terminal import url_of
from tests.server.conftest import MESSAGES

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """Short enough: the system takes 107 bytes."""
    monkeypatch.chdir(tmp_path)
    return Path("s.sock")


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_its_user_and_group_may_connect_and_it_goes_with_the_server(path):
    with listen_at(path) as sock:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert connects(path)
        assert url_of(sock.getsockname()) == "unix:s.sock"
    assert not path.exists()


def test_the_umask_of_files_stays_what_it_was(path):
    usual = os.umask(0o027)
    try:
        with listen_at(path):
            pass
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(usual)


def test_a_file_that_a_killed_process_left_is_replaced(path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
    assert path.is_socket()
    with listen_at(path):
        assert connects(path)


@pytest.mark.parametrize("num_waiting", [0, 3], ids=["a free one", "one with a full backlog"])
def test_a_socket_where_somebody_listens_stays(path, num_waiting):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(0)
        waiting = []
        for _ in range(num_waiting):
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            client.connect_ex(str(path))
            waiting.append(client)
        with pytest.raises(OSError, match="in use"), listen_at(path):
            pass
        assert path.is_socket()
        for client in waiting:
            client.close()


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_socket_is_never_removed(path, make):
    make(path)
    with pytest.raises(OSError, match="not a socket"), listen_at(path):
        pass
    assert os.path.lexists(path)


def test_a_file_that_is_another_s_by_now_stays(path):
    with listen_at(path):
        path.unlink()
        path.touch()
    assert path.exists()


def test_a_path_that_is_too_long_is_said(path):
    with pytest.raises(OSError, match="too long"), listen_at(Path("x" * 200)):
        pass


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--port", "8000"], "--uds s and --port 8000 exclude each other"),
        (["--host", "0.0.0.0"], "--uds s and --host 0.0.0.0 exclude each other"),
        (["--uds", "no/such/s"], "there is no folder no/such"),
    ],
)
def test_a_path_and_an_address_contradict_each_other(more, words):
    with pytest.raises(ConfigError, match=words):
        parse(["--uds", "s", *more], {})


def test_a_port_of_the_environment_contradicts_too():
    with pytest.raises(ConfigError, match="exclude each other"):
        parse(["--uds", "s"], {"ONELOOP_PORT": "80"})


def test_no_host_is_wrong_there():
    assert allowed_hosts(ServerConfig(uds="s")) == ("*",)


def test_a_process_serves_there_and_takes_the_file_along(path):
    """With the loop of the real server; a stream is drained."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.fake_server", "--fake", "tiny", "--uds", str(path.absolute())],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child, httpx.Client(transport=httpx.HTTPTransport(uds=str(path.absolute())), timeout=None) as client:
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == str(path.absolute())
            while client.get("http://any.name/health").json()["status"] != "ok":
                pass
            answer = client.post(f"http://any.name{CHAT}", json={"messages": MESSAGES, "max_tokens": 3})
            assert answer.json()["usage"]["completion_tokens"] == 3
            streamed = client.post(
                f"http://any.name{CHAT}", json={"messages": MESSAGES, "max_tokens": 3, "stream": True}
            )
            assert streamed.text.endswith("data: [DONE]\n\n")
            child.send_signal(signal.SIGTERM)
            assert child.wait() == 0
        finally:
            child.kill()
    assert not path.exists()


def test_a_second_server_at_the_path_says_so_in_one_line(path):
    with listen_at(path):
        second = subprocess.run(
            [sys.executable, "-m", "server", "--uds", str(path.absolute())], cwd=ROOT, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    assert second.returncode == 1
    assert second.stderr == f"oneloop: cannot listen on {path.absolute()}: Address already in use\n"
