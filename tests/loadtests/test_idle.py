"""`python -m loadtests idle` against a real server in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from loadtests.__main__ import main

ROOT = Path(__file__).parents[2]


def test_idle_connections_are_counted_measured_and_closed(capsys):
    command = [sys.executable, "-m", "tests.fake_server", "--fake", "paused", "--no-access-log"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            while url not in server.stdout.readline():
                assert server.poll() is None
            assert (
                main(["idle", "--base-url", url, "--pid", str(server.pid), "--connections", "40", "--probes", "3"]) == 0
            )
        finally:
            server.terminate()
            server.wait(60)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["connections"], found["still_open"]) == (40, 40)
