"""`oneloop ray` before it begins anything, and what it says where nothing can be begun."""

from __future__ import annotations

import subprocess
import sys

import pytest

from server.config.server_options import ConfigError
from server.ray import command

MESSAGE = """The deployment failed to start 3 times in a row. Error:
Traceback (most recent call last):
  File "load.py", line 185, in _prepare
    raise LoadError(str(error)) from error
runtime.weights.rules.WeightsError: /nothing: no such file or folder

The above exception was the direct cause of the following exception:
server.models.lifecycle.LoadError: /nothing: no such file or folder
"""


def test_the_reason_is_what_the_last_traceback_ends_with():
    assert command.reasons({"Replica": MESSAGE, "Ingress": ""}) == "Replica: /nothing: no such file or folder"
    assert command.reasons({"Replica": "it takes long"}) == ""


def test_help_needs_no_ray(capsys):
    assert command.main(["--help"]) == 0
    assert "--ingress-replicas" in capsys.readouterr().out


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"oneloop\[ray\]"):
        command.main([])


def test_options_are_judged_before_anything_is_begun(monkeypatch):
    monkeypatch.setattr(command, "run", lambda options, config: pytest.fail("nothing may begin"))

    def refuse(config):
        raise ConfigError(f"not {config.tool_parser}")

    with pytest.raises(ConfigError, match="not nobody"):
        command.main(["--tool-parser", "nobody"], refuse)


def test_neither_the_room_nor_its_help_imports_ray_or_torch():
    code = (
        "import sys, server.ray; from server.ray import command; command.main(['--help']); "
        "assert not {'ray', 'torch', 'starlette'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
