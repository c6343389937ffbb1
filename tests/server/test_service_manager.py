"""What a service manager hands to the server, and hears of it: a socket that is open already, and when somebody serves there."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.__main__ import opened
from server.cli import health
from server.config.parse import parse
from server.config.server_options import ConfigError
from server.process.app import allowed_hosts
from server.process.listening import passed, tell_manager

ROOT = Path(__file__).parents[2]
# What systemd does between fork and exec.
AS_A_MANAGER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1'}; "
    "os.execv(sys.executable, [sys.executable, '-m', 'tests.fake_server', '--fake', 'tiny', *sys.argv[2:]])"
)


@contextlib.contextmanager
def started(sock: socket.socket, *options: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", AS_A_MANAGER, str(sock.fileno()), *options], pass_fds=[sock.fileno()], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_it_serves_at_a_socket_that_was_open_before_it_began_and_says_when(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a path of few bytes
    with socket.create_server(("127.0.0.1", 0)) as sock, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("notify")
        manager.settimeout(60)
        # A client that comes first waits in the backlog.
        client = http.client.HTTPConnection(*sock.getsockname(), timeout=60)
        client.request("GET", "/health/live")
        with started(sock, NOTIFY_SOCKET=str(tmp_path / "notify")) as process:
            assert client.getresponse().status == 200
            assert manager.recv(100) == b"READY=1"
            client.close()
            process.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            assert f"serves on http://127.0.0.1:{sock.getsockname()[1]}" in out


def test_a_place_that_is_named_twice_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as sock, started(sock, "--host", "::1") as process:
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 2 or "ConfigError" in complaint
    assert "leave out --host, --port and --uds" in complaint


def test_variables_that_are_for_another_process_mean_nothing():
    environ = {"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "A": "b"}
    assert passed(environ) is None
    assert environ == {"A": "b"}
    assert passed({}) is None


def test_several_sockets_are_refused_by_their_number():
    with pytest.raises(OSError, match="passed 2 sockets"):
        passed({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"})


@contextlib.contextmanager
def as_third(sock: socket.socket) -> Iterator[dict[str, str]]:
    """`sock` as descriptor 3 of this process, and the variables that say so."""
    with open("/dev/null") as null:  # so that 3 is somebody's, and can be given back
        before = os.dup(3) if os.path.exists("/proc/self/fd/3") else null.fileno()
        kept = os.dup(before)
        os.dup2(sock.fileno(), 3)
        try:
            yield {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
        finally:
            os.dup2(kept, 3)
            os.close(kept)
            if before != null.fileno():
                os.close(before)


def test_a_socket_that_does_not_listen_is_refused():
    with socket.socket() as sock, as_third(sock) as environ, pytest.raises(OSError, match="does not listen"):
        passed(environ)


@pytest.mark.parametrize(("host", "hosts"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_who_may_connect_is_decided_by_where_the_socket_really_listens(monkeypatch, host, hosts):
    """A page that names itself otherwise is refused at a loopback address, and there alone (DNS rebinding)."""
    with socket.create_server((host, 0)) as sock, as_third(sock) as environ, contextlib.ExitStack() as stack:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        config, found = opened(parse([], {}), stack)
        assert (config.host, config.listen_port) == found.getsockname()
        assert ("*" not in allowed_hosts(config)) == hosts


def test_nobody_is_told_anything_where_nobody_asked(tmp_path):
    tell_manager("READY=1", {})
    tell_manager("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "gone")})
    tell_manager("READY=1", {"NOTIFY_SOCKET": "vsock:2:1234"})


@pytest.fixture(scope="module")
def answering(tmp_path_factory) -> Iterator[tuple[str, str]]:
    """A server of the tests as a process; the options by which it is found."""
    path = str(tmp_path_factory.mktemp("uds") / "s")
    command = [sys.executable, "-m", "tests.fake_server", "--fake", "tiny", "--uds", path]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == path
        while "serves on" not in process.stdout.readline():
            pass
        yield "--uds", path
        process.terminate()
        process.communicate()


@pytest.mark.parametrize("kind", [[], ["live"], ["ready"], ["generate"]])
def test_health_asks_the_server_that_the_options_name(answering, capsys, kind):
    assert health.main([*kind, *answering]) == 0
    assert health.main([*answering, *kind]) == 0
    assert capsys.readouterr().out.startswith("{")


def test_health_is_bad_where_nobody_answers(capsys):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert health.main(["live", "--port", str(sock.getsockname()[1])]) == 1
    assert "no server responds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["well"], "live, ready, generate"), (["live", "ready"], "one of live"), (["live", "--prot", "1"], "--port")],
)
def test_health_refuses_what_it_does_not_know(argv, words, capsys):
    assert health.main(argv) == 2
    assert words in capsys.readouterr().err


def test_a_socket_of_no_manager_is_the_one_that_the_options_name():
    with contextlib.ExitStack() as stack:
        config, sock = opened(parse(["--port", "0"], {}), stack)
        assert (config.port, sock.getsockname()[0]) == (0, "127.0.0.1")


def test_config_errors_name_all_that_is_to_be_left_out(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as sock, as_third(sock) as environ, contextlib.ExitStack() as stack:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match="--port"):
            opened(parse(["--port", "1"], {}), stack)
