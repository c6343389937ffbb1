"""`oneloop ps` and `stop`: how servers are found, described and ended. A stand-in process takes the place of a server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from server.cli import servers
from server.config.server_options import ConfigError
from server.process.running import RunningServer, announced, end, folder, running

ONE = RunningServer(os.getpid(), "http://127.0.0.1:8000", ("qwen3-0.6b",), 1.0)
OTHER = RunningServer(7, "unix:/run/x.sock", ("other", "third"), 2.0)

STAND_IN = """
import os, signal, sys
from server.process.running import RunningServer, announced
with announced(RunningServer(os.getpid(), "http://127.0.0.1:1", ("stand-in",), 1.0)):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    signal.pause()
"""


@pytest.fixture(autouse=True)
def of_this_test(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def stand_in():
    with subprocess.Popen([sys.executable, "-c", STAND_IN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_server_is_listed_while_it_runs():
    assert running() == []
    with announced(ONE):
        assert running() == [ONE]
    assert running() == []
    assert not [*folder().iterdir()]


def test_a_server_that_was_killed_is_no_longer_listed(stand_in):
    assert [server.pid for server in running()] == [stand_in.pid]
    stand_in.send_signal(signal.SIGKILL)
    stand_in.wait()
    assert running() == []
    assert not [*folder().iterdir()]


def test_a_folder_that_cannot_be_written_to_stops_no_server(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with announced(ONE):
        assert running() == []


def test_stop_ends_a_server_and_waits_for_it(stand_in, capsys):
    assert servers.stop(["stand-in"]) == 0
    assert stand_in.wait() == 0
    assert capsys.readouterr().out == "stopping http://127.0.0.1:1: running requests finish first\n"


def test_stop_without_a_name_ends_nothing(stand_in):
    with pytest.raises(ConfigError, match="name a server, or use --all"):
        servers.stop([])
    assert stand_in.poll() is None


def test_a_number_that_belongs_to_another_process_gets_no_signal(stand_in):
    assert end(replace(running()[0], started=2.0), 0)
    assert stand_in.poll() is None


@pytest.mark.parametrize(
    ("names", "found"),
    [([], None), (["other"], OTHER), (["third"], OTHER), (["7"], OTHER), (["8000"], ONE), ([ONE.url], ONE)],
)
def test_a_server_is_named_by_model_port_pid_or_url(names, found):
    if found is None:
        with pytest.raises(ConfigError, match="name a server, or use --all; running: http://127"):
            servers.chosen([ONE, OTHER], names, everyone=False)
    else:
        assert servers.chosen([ONE, OTHER], names, everyone=False) == [found]
    assert servers.chosen([ONE, OTHER], (), everyone=True) == [ONE, OTHER]


@pytest.mark.parametrize(
    ("servers_there", "names", "said"),
    [
        ([], [], "no server of this user runs here"),
        ([ONE], ["nobody"], "no server has the name nobody; running: http://127.0.0.1:8000"),
        ([ONE, replace(ONE, pid=9, url="http://127.0.0.1:9")], ["qwen3-0.6b"], "several servers have the name"),
    ],
)
def test_a_name_that_means_no_server_is_refused(servers_there, names, said):
    with pytest.raises(ConfigError, match=said):
        servers.chosen(servers_there, names, everyone=False)


def test_ps_says_what_does_not_answer(stand_in, capsys):
    assert servers.ps([]) == 0
    line = capsys.readouterr().out
    assert f"http://127.0.0.1:1  pid {stand_in.pid}  stand-in  does not answer" in line
    assert servers.ps(["--json"]) == 0
    assert '"loaded": null' in capsys.readouterr().out
    with pytest.raises(ConfigError, match="unknown option --yaml"):
        servers.ps(["--yaml"])


async def test_ps_names_the_models_that_a_server_has_loaded(serve):
    server = await serve(served_model_name=("tiny",), api_key=("secret",))
    url = str(server.http.base_url).rstrip("/")
    assert await asyncio.to_thread(servers.loaded, url, {"ONELOOP_API_KEY": "secret"}) == ["tiny"]
    assert await asyncio.to_thread(servers.loaded, url, {}) is None
