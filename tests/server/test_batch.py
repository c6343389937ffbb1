"""batch: lines in, lines out; what is wrong with one line disturbs no other, and what was cut off can be resumed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server.cli import batch
from server.models.defaults import sampling_defaults
from server.models.lifecycle import LoadError
from server.models.model import LoadedModel
from tests.fakes import FakeEngine, fake_model
from tests.server.tiny import EOS, VOCAB_SIZE, chatml, loaded_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Limited(FakeEngine):
    """Refuses, as the engine does, what comes while more than `max_queue` sequences are there."""

    most_at_once = 0
    max_queue = 10**9
    dies_at = 10**9
    interrupts_at = 10**9
    refused = 0

    def submit(self, requests):
        from runtime.api import EngineStopped, QueueFull

        if len(self.submitted) >= self.dies_at:
            self.unhealthy = "the engine died"
            raise EngineStopped(self.unhealthy)
        if len(self.live) >= self.max_queue:
            self.refused += 1
            raise QueueFull(len(self.live), self.max_queue)
        stream = super().submit(requests)
        self.most_at_once = max(self.most_at_once, len(self.live))
        if len(self.submitted) == self.interrupts_at:
            os.kill(os.getpid(), signal.SIGINT)
        return stream


class Runs:
    """`python -m server batch` in this process, over a fake engine that says the prompt in upper case."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.tokenizer = tiny_tokenizer()
        self.settings: dict = {}
        self.engine: Limited | None = None

    async def load(self, config, report, cancel) -> LoadedModel:
        if config.model == "broken":
            raise LoadError("model.safetensors is truncated")
        model = fake_model(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}), max_model_len=200, max_num_seqs=4)
        self.engine = Limited(self._say, model=model)
        for name, value in self.settings.items():
            setattr(self.engine, name, value)
        return loaded_model(self.engine, self.tokenizer, chatml(self.tokenizer), sampling_defaults(), ("tiny",))

    def _say(self, request):
        return [*self.tokenizer.encode(self.tokenizer.decode(request.prompt_ids).upper()), EOS]

    def __call__(self, *lines: object, options: tuple[str, ...] = ()) -> int:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("\n".join(texts))
        return batch.main([str(self.source), str(self.target), *options], self.load)

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.target.read_text().splitlines()]

    @property
    def by_id(self) -> dict[str, dict]:
        return {record["custom_id"]: record for record in self.records}


@pytest.fixture
def run(tmp_path):
    return Runs(tmp_path)


def line(custom_id: str, url: str = COMPLETIONS, **body) -> dict:
    default = {"prompt": custom_id} if url == COMPLETIONS else {"messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**default, **body}}


def text_of(record: dict) -> str:
    choice = record["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_responses_are_answered_and_not_stored(run):
    lines = [{"custom_id": id, "method": "POST", "url": "/v1/responses", "body": {"input": id}} for id in "ab"]
    lines[1]["body"]["background"] = True
    assert run(*lines) == 1
    body = run.by_id["a"]["response"]["body"]
    assert (body["status"], body["store"]) == ("completed", False)
    assert body["output"][0]["content"][0]["text"] == "USER\nA\nASSISTANT\n"
    assert run.by_id["b"]["response"]["body"]["error"]["param"] == "background"


def test_every_line_is_answered_as_http_would(run, capsys):
    assert run(line("a"), line("b", CHAT), line("c", model="tiny", n=2)) == 0
    records = run.by_id
    assert set(records) == {"a", "b", "c"}
    assert text_of(records["a"]) == "A"
    assert text_of(records["b"]) == "USER\nB\nASSISTANT\n"
    assert len(records["c"]["response"]["body"]["choices"]) == 2
    for record in records.values():
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert record["error"] is None
        assert record["response"]["status_code"] == 200
        assert record["response"]["body"]["id"].endswith(record["response"]["request_id"])
    assert "3 answered, 0 failed" in capsys.readouterr().err
    assert run.engine.closed


def test_many_lines_are_in_flight_a_bounded_number_at_a_time(run):
    assert run(*(line(f"x{i}") for i in range(300))) == 0
    assert {custom_id: text_of(record) for custom_id, record in run.by_id.items()} == {
        f"x{i}": f"X{i}" for i in range(300)
    }
    assert 4 <= run.engine.most_at_once <= 8


def test_a_full_queue_is_waited_for(run):
    run.settings = {"max_queue": 3}
    assert run(*(line(f"x{i}", n=2) for i in range(30))) == 0
    assert run.engine.refused
    assert len(run.records) == 30


@pytest.mark.parametrize(
    ("bad", "custom_id", "words"),
    [
        ("{broken", None, "malformed"),
        ("[1]", None, "object"),
        ({"custom_id": 5, "method": "POST", "url": CHAT, "body": {}}, None, "str"),
        ({"method": "POST", "url": CHAT, "body": {}}, None, "custom_id"),
        ({"custom_id": "bad", "method": "POST", "url": CHAT}, "bad", "body"),
        ({**line("bad"), "extra": 1}, "bad", "extra"),
        ({**line("bad"), "method": "GET"}, "bad", "GET"),
        (line("bad", "/v1/moderations"), "bad", "/v1/moderations"),
        (line("bad", stream=True), "bad", "stream"),
        ("x" * 200_000, None, "larger"),
    ],
)
def test_a_line_that_is_no_request_gets_an_error_and_the_others_their_answers(run, bad, custom_id, words):
    assert run(line("a"), bad, line("b"), options=("--max-body-size", "65536")) == 1
    records = run.by_id
    assert set(records) == {"a", custom_id, "b"}
    assert (text_of(records["a"]), text_of(records["b"])) == ("A", "B")
    record = records[custom_id]
    assert record["response"] is None
    assert words in record["error"]["message"]
    assert "line 2" in record["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"temperature": 9}, 400, "temperature"),
        ({"no_such_field": 1}, 400, "no_such_field"),
        ({"model": "other"}, 404, "model"),
        ({"prompt": "x" * 300}, 400, "prompt"),
    ],
)
def test_a_request_that_is_refused_carries_the_servers_refusal(run, body, status, param):
    assert run(line("a"), line("bad", **body)) == 1
    response = run.by_id["bad"]["response"]
    assert response["status_code"] == status
    assert response["body"]["error"]["param"] == param
    assert response["request_id"]
    assert text_of(run.by_id["a"]) == "A"


def test_blank_lines_and_a_byte_order_mark_are_no_requests(run):
    assert run("\ufeff" + json.dumps(line("a")), "", "  ", line("b")) == 0
    assert len(run.records) == 2


@pytest.mark.parametrize("options", [(), ("--resume",)])
def test_of_two_lines_with_one_custom_id_the_later_fails_and_disturbs_no_other(run, options):
    for _ in range(2 if options else 1):
        assert run(line("a"), line("b"), line("a", prompt="z"), options=options) == 1
    assert [text_of(record) for record in run.records if record["response"]] == ["A", "B"]
    (failed,) = (record for record in run.records if record["error"])
    assert (failed["custom_id"], failed["error"]["param"]) == ("a", "custom_id")
    assert failed["error"]["message"].startswith("line 3: an earlier line has the same custom_id")


def test_resuming_keeps_what_was_answered_and_does_the_rest(run, capsys):
    assert run(line("a"), line("b", temperature=9), line("c")) == 1
    answered = [record for record in run.records if record["custom_id"] in "ac"]
    run.target.write_text(run.target.read_text() + '{"id": "cut o')
    assert run(line("a"), line("b"), line("c"), line("d"), options=("--resume",)) == 0
    assert [request.prompt_ids for request in run.engine.submitted] == [run.tokenizer.encode(t) for t in "bd"]
    assert len(run.records) == 4
    assert [record for record in run.records if record["custom_id"] in "ac"] == answered
    assert "2 answered, 0 failed, 2 answered earlier" in capsys.readouterr().err
    assert [path.name for path in sorted(run.target.parent.iterdir())] == ["in.jsonl", "out.jsonl"]


def test_an_output_that_has_content_is_not_written_over(run, capsys):
    run.target.write_text("precious")
    assert run(line("a")) == 1
    assert "--resume" in capsys.readouterr().err
    assert run.target.read_text() == "precious"


def test_standard_input_and_output_may_be_the_files(run, capsysbinary, monkeypatch):
    text = json.dumps(line("a")) + "\n" + json.dumps(line("b"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert batch.main(["-", "-"], run.load) == 0
    out = capsysbinary.readouterr().out
    assert sorted(json.loads(line)["custom_id"] for line in out.splitlines()) == ["a", "b"]


def test_a_dead_engine_ends_the_batch_with_what_was_answered(run, capsys):
    run.settings = {"dies_at": 20}
    assert run(*(line(f"x{i}") for i in range(100))) == 1
    assert "the engine has failed (the engine died)" in capsys.readouterr().err
    assert all(record["response"]["status_code"] == 200 for record in run.records)
    assert run(*(line(f"x{i}") for i in range(100)), options=("--resume",)) == 1
    run.settings = {}
    assert run(*(line(f"x{i}") for i in range(100)), options=("--resume",)) == 0
    assert len(run.by_id) == len(run.records) == 100


def test_ctrl_c_ends_it_with_whole_lines_that_can_be_resumed(run):
    run.settings = {"interrupts_at": 20}
    assert run(*(line(f"x{i}") for i in range(100))) == 130
    assert 0 < len(run.records) < 100
    assert run.engine.live == []
    run.settings = {}
    assert run(*(line(f"x{i}") for i in range(100)), options=("--resume",)) == 0
    assert len(run.by_id) == len(run.records) == 100


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "batch IN OUT"),
        (["in.jsonl"], "batch IN OUT"),
        (["--model", "x", "in.jsonl"], "batch IN OUT"),
        (["in.jsonl", "out.jsonl", "more.jsonl"], "batch IN OUT"),
        (["-", "-", "--resum"], "did you mean --resume"),
        (["--resume", "-", "-"], "--resume needs an output file"),
        (["-", "-", "--resume"], "--resume needs an output file"),
        (["same.jsonl", "./same.jsonl"], "use different files"),
        (["-", "-", "--max-num-seq", "3"], "did you mean --max-num-seqs"),
        (["-", "-", "--port=80"], "--port applies to oneloop serve only"),
        (["-", "-", "--no-access-log"], "--no-access-log applies to oneloop serve only"),
    ],
)
def test_a_command_line_that_cannot_be_honoured_is_refused_with_2(argv, words, capsys):
    assert batch.main(argv, None) == 2
    assert words in capsys.readouterr().err


def test_what_cannot_begin_ends_with_1_and_one_line(run, capsys):
    assert run(line("a"), options=("--model", "broken")) == 1
    assert "oneloop: model.safetensors is truncated\n" in capsys.readouterr().err
    assert batch.main([str(run.source) + ".no", "-"], run.load) == 1
    assert "No such file" in capsys.readouterr().err


def test_the_command_is_reached_by_its_name_and_tells_how_it_is_used():
    for arguments, code, words in ((["--help"], 0, "custom_id"), ([], 2, "batch IN OUT")):
        ended = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "server", "batch", *arguments],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == code
        assert words in ended.stdout + ended.stderr
        for heavy in ("torch", "starlette", "tokenizers"):
            assert f" {heavy}\n" not in ended.stderr
