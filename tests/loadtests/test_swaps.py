"""`bench swaps`: what it makes of answers, whole, cut off and refused. At a real server: tests/e2e/test_swaps.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from loadtests import swaps
from loadtests.__main__ import main
from loadtests.address import Address


class Several(BaseHTTPRequestHandler):
    """`steady` always says the same, `fickle` never does, `torn` cannot be loaded, `cut` ends its streams before their end."""

    num_answers = 0

    def do_GET(self) -> None:
        cards = [{"id": name, "tasks": None} for name in ("steady", "fickle", "torn", "cut")]
        is_health = self.path == "/health"
        self._reply(200, {"running": 8} if is_health else {"data": [*cards, {"id": "embeds", "tasks": ["embed"]}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        model, num = asked["model"], asked["max_tokens"]
        if model == "torn":
            self._reply(503, {"error": {"message": "The model 'torn' could not be loaded"}})
            return
        type(self).num_answers += 1
        text = f"word {self.num_answers}" if model == "fickle" else "word"
        usage = {"completion_tokens": num}
        if not asked["stream"]:
            self._reply(200, {"choices": [{"text": text}], "usage": usage})
            return
        events = [json.dumps({"choices": [{"text": text}]}), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
        body = "".join(f"data: {each}\n\n" for each in events[: 1 if model == "cut" else 3])
        self._send(200, body.encode())

    def _reply(self, status: int, answer: object) -> None:
        self._send(status, json.dumps(answer).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Several)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_models_that_generate_are_those_that_say_so_or_nothing(url):
    assert swaps.generating_models(Address.parse(url)) == ["steady", "fickle", "torn", "cut"]


def test_a_model_that_cannot_be_loaded_is_told_and_costs_the_others_nothing(url, capsys):
    command = ["swaps", "--url", url, "--models", "steady", "torn", "cut", "--rounds", "2", "--streams", "3"]
    assert main(command) == 0
    found = last_line(capsys)
    assert found["models"]["torn"] == {"failure": "The model 'torn' could not be loaded"}
    assert found["models"]["steady"]["same_answers"]
    assert (found["streams"]["whole"], found["streams"]["same_text"], found["streams"]["failures"]) == (3, 3, [])


def test_an_answer_that_changes_is_a_failure(url, capsys):
    assert main(["swaps", "--url", url, "--models", "steady", "fickle", "--streams", "1"]) == 1
    assert not last_line(capsys)["models"]["fickle"]["same_answers"]


def test_a_stream_that_is_cut_off_is_a_failure(url, capsys):
    assert main(["swaps", "--url", url, "--models", "cut", "steady", "--streams", "2"]) == 1
    found = last_line(capsys)["streams"]
    assert (found["whole"], len(found["failures"])) == (0, 2)


def test_one_model_alone_takes_no_turns(url, capsys):
    assert main(["swaps", "--url", url, "--models", "steady"]) == 2
    assert "two models" in capsys.readouterr().err
