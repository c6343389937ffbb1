"""Traces of real traffic, sent again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.__main__ import main
from loadtests.trace import BadTrace, read_trace
from tests.loadtests.test_commands import last_json

LINES = (
    {"timestamp": 3000, "input_length": 1030, "output_length": 2, "hash_ids": [1, 2, 4]},
    {"timestamp": 1000, "input_length": 1030, "output_length": 3, "hash_ids": [1, 2, 3]},
    {"timestamp": 2000, "input_length": 5, "output_length": 1},
)


def trace(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n\n")
    return path


def test_requests_come_as_they_came_and_share_what_they_shared(tmp_path):
    prompt = read_trace(trace(tmp_path, *LINES))
    assert prompt.arrivals().seconds == (0.0, 1.0, 2.0)
    assert prompt.arrivals(speed=4.0).seconds == (0.0, 0.25, 0.5)
    lengths = [each.num_output_tokens for each in prompt.recorded]
    first, second, third = (json.loads(body)["prompt"] for body in prompt.scripts(0, lengths, {}))
    assert lengths == [3, 1, 2]
    assert [len(first), len(second), len(third)] == [1030, 5, 1030]
    assert first[:1024] == third[:1024]
    assert first[1024:] != third[1024:]
    assert first[:512] != first[512:1024]
    other = json.loads(prompt.scripts(1, lengths, {})[0])["prompt"]
    assert other[:512] != first[:512]  # another seed finds nothing in the cache of the last run


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("x", "line 1"), ("[]", "line 1"), ("{}", "no 'timestamp'"),
        ({"timestamp": 1, "input_length": 0, "output_length": 1}, "at least one"),
        ({"timestamp": -1, "input_length": 1, "output_length": 1}, "timestamp"),
        ({"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}, "too many"), ("", "no requests"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_by_its_line(tmp_path, line, reason):
    with pytest.raises(BadTrace, match=reason):
        read_trace(trace(tmp_path, line))


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--workload", "c1"], "leave out --workload"),
        (["--output-tokens", "3"], "leave out"),
        (["--num-requests", "9"], "the trace has 3"),
        (["--trace-speed", "0"], "speed of a trace"),
        (["--rate", "3"], "not allowed with"),
    ],
)
def test_what_a_trace_says_already_is_not_ignored_but_refused(tmp_path, args, reason, capsys):
    try:
        code = main(["serve", "--trace", str(trace(tmp_path, *LINES)), *args])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert reason in capsys.readouterr().err


def test_a_trace_is_replayed_against_a_server(tmp_path, served, capsys):
    args = ["--trace", str(trace(tmp_path, *LINES)), "--trace-speed", "1000", "--num-requests", "2", "--warmup", "0"]
    assert main(["serve", "--base-url", served[0], *args]) == 0
    [run] = last_json(capsys)[1]["runs"]
    assert (run["workload"], run["requests"], run["out_tokens"], run["other_length"]) == ("chats", 2, 4, 0)
