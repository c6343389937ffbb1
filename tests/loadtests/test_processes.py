"""A started server is measured, and always gone afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtests import processes
from loadtests.address import Address
from loadtests.probe import is_healthy
from loadtests.processes import CannotStart, ServerProcess, read_stat


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def toy(tmp_path: Path, *moods: str, grace_s: float = 15.0) -> tuple[ServerProcess, Address]:
    port = free_port()
    command = [sys.executable, "-m", "tests.loadtests.toy_server", str(port), *moods]
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return ServerProcess(command, tmp_path / "log", env, grace_s=grace_s), Address("127.0.0.1", port)


def wait_healthy(process: ServerProcess, address: Address) -> None:
    while not is_healthy(address, "/health"):
        assert not process.has_ended(), process.log_tail()
        time.sleep(0.01)


def test_a_server_is_gone_after_its_block_and_after_an_error_in_it(tmp_path):
    process, address = toy(tmp_path)

    def fail_inside() -> None:
        with process:
            wait_healthy(process, address)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail_inside()
    assert read_stat(process.pid) is None
    assert not is_healthy(address, "/health")


def test_a_child_that_left_the_session_goes_too(tmp_path):
    process, address = toy(tmp_path, "orphan")
    with process:
        wait_healthy(process, address)
        child = int(process.log_tail().split()[0])
        assert {stat.pid for stat in processes.family(process.pid)} == {process.pid, child}
    assert read_stat(child) is None


def test_a_server_that_ignores_sigterm_is_killed_after_its_grace(tmp_path):
    process, address = toy(tmp_path, "stubborn", grace_s=0.05)
    with process:
        wait_healthy(process, address)
    assert read_stat(process.pid) is None


def test_memory_and_cpu_are_those_of_the_whole_family(tmp_path):
    process, address = toy(tmp_path, "orphan")
    with process:
        wait_healthy(process, address)
        child = int(process.log_tail().split()[0])
        assert processes.resident_mib(process.pid) > processes.resident_mib(child) > 0
        assert processes.peak_resident_mib(process.pid) >= processes.resident_mib(process.pid) * 0.9
        assert processes.cpu_s(process.pid) > 0


def test_a_program_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(CannotStart, match="no-such-program"), ServerProcess(["no-such-program"], tmp_path / "log"):
        pass


def test_an_ended_server_is_noticed(tmp_path):
    process, _ = toy(tmp_path, "dies")
    with process:
        while not process.has_ended():
            time.sleep(0.01)
        assert "toy refuses to live" in process.log_tail()


def test_a_stop_signal_that_comes_during_the_start_still_stops_the_server(tmp_path, monkeypatch):
    process, _ = toy(tmp_path)
    start = process._start

    def start_and_be_interrupted() -> None:
        start()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(process, "_start", start_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt), process:
        pytest.fail("the block was entered")
    assert read_stat(process.pid) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_and_its_kin_stop_the_server_of_a_comparison(tmp_path, number):
    port, root = free_port(), Path(__file__).parents[2]
    config = tmp_path / "servers.toml"
    config.write_text(
        f'[[server]]\nname = "toy"\nport = {port}\n'
        f'command = ["{sys.executable}", "-m", "tests.loadtests.toy_server", "{port}", "orphan"]'
    )
    command = [sys.executable, "-m", "loadtests", "compare", "--servers", str(config), "--workload", "c1"]
    command += ["--logs", str(tmp_path), "--idle-seconds", "60"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as compare:
        address = Address("127.0.0.1", port)
        while not is_healthy(address, "/health"):
            assert compare.poll() is None
            time.sleep(0.01)
        child = int((tmp_path / "toy.log").read_text().split()[0])
        compare.send_signal(number)
        out, _ = compare.communicate()
    assert compare.returncode == 130
    assert '"interrupted": true' in out.splitlines()[-1]
    assert not is_healthy(address, "/health")
    assert read_stat(child) is None
