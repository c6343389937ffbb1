"""`oneloop launch`: what clients are started with. Programs of the test that print their arguments and environment take their
place."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from server.cli import launch
from server.cli.launch import CLIENTS, Served, by_hand, main
from server.config.server_options import ConfigError

ROOT = Path(__file__).parents[2]
SERVED = Served("http://127.0.0.1:8000", "secret", "org/name", 40_000)
TELL = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("ONELOOP_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def programs(tmp_path):
    """A folder for PATH with a program for each client."""
    for client in CLIENTS.values():
        (tmp_path / client.program).write_text(TELL)
        (tmp_path / client.program).chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


async def started(programs: str, *argv: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    process = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "server", "launch", *argv], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PATH": programs, **environment},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    arguments, variables = json.loads(process.stdout)
    return arguments, variables


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_client_starts_with_the_servers_address_model_and_key(serve, programs, name):
    server = await serve(served_model_name=("tiny",), api_key=("secret",))
    url = f"http://127.0.0.1:{server.port}"
    arguments, variables = await started(
        programs, name, "--url", f"{url}/v1/", "--", "--last", "-x", ONELOOP_API_KEY="secret"
    )
    told = json.dumps([arguments, variables])
    assert url in told
    assert "tiny" in told
    assert "secret" in variables.values() or '"apiKey": "secret"' in variables["OPENCODE_CONFIG_CONTENT"]
    assert arguments[-2:] == ["--last", "-x"]


def test_codex_has_a_provider_of_the_responses_api_by_its_command_line():
    made = CLIENTS["codex"].launch(SERVED)
    settings = dict(word.split("=", 1) for word in made.arguments[2:] if word != "-c")
    assert settings == {
        "model_provider": '"oneloop"',
        "model_providers.oneloop.name": '"oneloop"',
        "model_providers.oneloop.base_url": '"http://127.0.0.1:8000/v1"',
        "model_providers.oneloop.env_key": '"ONELOOP_API_KEY"',
        "model_providers.oneloop.wire_api": '"responses"',
        "model_context_window": "40000",
    }
    assert made.environment == {"ONELOOP_API_KEY": "secret"}


def test_claude_has_the_model_in_the_place_of_each_of_its_own():
    environment = CLIENTS["claude"].launch(SERVED).environment
    assert {value for name, value in environment.items() if "MODEL" in name} == {"org/name"}
    assert (environment["ANTHROPIC_BASE_URL"], environment["ANTHROPIC_AUTH_TOKEN"]) == (SERVED.url, "secret")
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "10000"


def test_opencode_has_its_configuration_in_a_variable():
    settings = json.loads(CLIENTS["opencode"].launch(SERVED).environment["OPENCODE_CONFIG_CONTENT"])
    assert settings["model"] == "oneloop/org/name"
    assert settings["provider"]["oneloop"]["options"] == {"baseURL": "http://127.0.0.1:8000/v1", "apiKey": "secret"}
    assert settings["provider"]["oneloop"]["models"]["org/name"]["limit"] == {"context": 40_000, "output": 10_000}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_server_that_tells_no_context_leaves_it_to_the_client(name):
    made = CLIENTS[name].launch(SERVED._replace(max_model_len=None))
    assert "None" not in str(made)
    assert "null" not in str(made)


async def test_print_shows_lines_of_a_shell_and_needs_no_client(serve, capsys, monkeypatch):
    server = await serve(served_model_name=("tiny",))
    monkeypatch.setenv("PATH", "")
    url = f"http://127.0.0.1:{server.port}"
    assert await asyncio.to_thread(main, ["claude", "--url", url, "--print"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"export ANTHROPIC_BASE_URL={url}" in lines
    assert shlex.split(lines[-1]) == ["claude", "--model", "tiny"]


def test_lines_by_hand_are_quoted():
    assert by_hand(["a", "b c"], {"X": "y z"}) == "export X='y z'\na 'b c'"


async def test_a_context_too_small_for_an_agent_is_told(serve, programs):
    server = await serve(max_model_len=512)
    process = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "server", "launch", "codex", "--url", f"http://127.0.0.1:{server.port}"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PATH": programs},
    )  # fmt: skip
    assert "codex sends instructions of up to 32,768 tokens, and the model's context has 512" in process.stderr


async def test_what_cannot_be_started_is_refused_with_what_to_do(serve, monkeypatch):
    server = await serve(served_model_name=("tiny",), api_key=("secret",))
    url = f"http://127.0.0.1:{server.port}"
    monkeypatch.setenv("PATH", "")
    for argv, said in (
        (["claude", "--url", url, "--api-key", "secret"], "claude is not installed: run npm install -g @anthropic"),
        (["codex", "--url", url], "requires an API key: use --api-key, or set ONELOOP_API_KEY"),
        (["codex", "--url", url, "--api-key", "secret", "--model", "other"], "has no model other; it serves tiny"),
        (["codxe"], r"'codxe' is not one of .* \(did you mean codex\?\)"),
        (["codex", "--url", "http://127.0.0.1:9"], "no server responds at http://127.0.0.1:9 .*oneloop serve MODEL"),
        (["codex", "--url", "unix:/x.sock"], "start it with --port"),
        ([], "'' is not one of codex"),
    ):
        with pytest.raises(ConfigError, match=said):
            await asyncio.to_thread(main, argv)


def test_the_only_server_that_runs_is_taken(monkeypatch):
    other = launch.running()
    assert other == []
    assert launch._base(None, {"ONELOOP_PORT": "9"}) == "http://127.0.0.1:9"
    one = type("Server", (), {"url": "http://127.0.0.1:77"})
    monkeypatch.setattr(launch, "running", lambda: [one])
    assert launch._base(None, {}) == "http://127.0.0.1:77"
    monkeypatch.setattr(launch, "running", lambda: [one, one])
    assert launch._base(None, {}) == "http://127.0.0.1:8000"
