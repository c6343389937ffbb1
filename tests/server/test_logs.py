"""The log's lines: text or JSON, and the id of the request that each belongs to."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from server.http import logs
from server.http.call import CURRENT_ID
from tests.fake_runner import FakeRunner
from tests.runtime.test_engine import engine_on, request, turns
from tests.server.conftest import MESSAGES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lines():
    """What the log writes as JSON."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JsonLines())
    root, before = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in out.getvalue().splitlines()]
    root.removeHandler(handler)
    root.setLevel(before)


def record(message="Hi", **facts) -> logging.LogRecord:
    made = logging.LogRecord("oneloop.x", logging.INFO, "f", 1, message, (), None)
    made.__dict__.update(facts)
    return made


def test_a_line_of_json_is_one_object_whatever_is_in_it():
    try:
        raise ValueError("no\nway")
    except ValueError:
        line = logs.JsonLines().format(record('a "b"\nc', exc_info=sys.exc_info()))
    assert "\n" not in line
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("info", "oneloop.x", 'a "b"\nc')
    assert "ValueError: no" in found["exception"]
    assert datetime.fromisoformat(found["time"]).utcoffset().total_seconds() == 0
    assert "request_id" not in found


def test_a_text_line_has_its_requests_id_once():
    CURRENT_ID.set(None)
    assert logs.TextLines().format(record()).endswith("oneloop.x: Hi")
    assert logs.TextLines().format(record(request_id="r1")).endswith("Hi [r1]")
    assert logs.TextLines().format(record("r1 has left", request_id="r1")).endswith("r1 has left")


async def test_every_line_that_a_request_causes_has_its_id(serve, lines):
    server = await serve(log_requests=True)
    await server.post("/v1/chat/completions", {"messages": MESSAGES, "odd": 1}, headers={"x-request-id": "mine"})
    loggers = {line["logger"] for line in lines() if line.get("request_id") == "mine"}
    assert {"oneloop.http", "oneloop.access"} <= loggers
    assert any("ignored fields" in line["message"] and line["request_id"] == "mine" for line in lines())


async def test_what_the_engine_says_of_a_request_has_the_id_of_who_asked(lines):
    async with engine_on(FakeRunner(manual=True)) as engine:
        asked = request(name="chatcmpl-mine-0")
        object.__setattr__(asked, "parent_id", "mine")
        async with engine.submit([asked]) as stream:
            await turns(3)
            assert engine.abort({"mine"}) == 1
            async for _ in stream:
                pass
    (line,) = (line for line in lines() if line["logger"] == "oneloop.engine")
    assert line["request_id"] == "mine"


def test_the_command_line_takes_it():
    code = "import logging; from server.http import logs; logs.begin('info', 'json'); logging.info('x %d', 5)"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert json.loads(ended.stderr)["message"] == "x 5"


def test_for_programs_every_line_of_a_servers_life_is_json():
    """What a person at the terminal sees, progress and summary, would be no object."""
    begun = "import sys; from server.http import logs; from tests import fake_server; logs.begin('info', 'json')"
    command = [sys.executable, "-c", f"{begun}; sys.exit(fake_server.main())", "--fake", "tiny", "--log-format", "json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        port = int(server.stdout.readline())  # the fake's own
        said = [json.loads(server.stderr.readline())]
        while "is served on" not in said[-1]["message"]:
            said.append(json.loads(server.stderr.readline()))
        server.terminate()
        rest, errors = server.communicate()
    assert f"http://127.0.0.1:{port}" in said[-1]["message"]
    assert rest == ""
    assert [json.loads(line)["logger"] for line in errors.splitlines()] == ["oneloop.process"] * 2


def test_for_programs_why_nothing_can_be_served_is_json_too():
    command = [sys.executable, "-m", "server", "--port", "0", "--model", "/no/such", "--log-format", "json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert (ended.returncode, ended.stdout) == (2, "")
    assert [(line["level"], "no such file or folder" in line["message"]) for line in lines][-1] == ("error", True)
