"""`gpu`: our server for real, on a CPU, started cold and warm and measured."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from loadtests.__main__ import main
from loadtests.gpu import WANTED, Session, write_model
from loadtests.workloads import find_workloads
from tests.loadtests.test_commands import last_json
from tests.loadtests.test_engine import TINY

VOCAB_SIZE = 259  # three special tokens and the bytes
OURS = [
    "--",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--max-model-len",
    "128",
    "--kv-cache-memory",
    "4MiB",
    "--threads",
    "1",
]


@pytest.fixture
def folders(tmp_path):
    shape = tmp_path / "tiny"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(TINY))
    common = ["--model-shape", str(shape), "--vocab-size", str(VOCAB_SIZE)]
    return [*common, "--logs", str(tmp_path / "logs"), "--idle-seconds", "0.1", "--workload", "c3_8_4"]


@pytest.mark.nightly
def test_one_command_starts_our_server_twice_and_takes_every_figure(folders, tmp_path, capsys):
    out_file = tmp_path / "records.jsonl"
    ladder = ["--ladder", "c3_8_4", "--shares", "50", "--ladder-seconds", "0.1"]
    assert main(["gpu", *folders, *ladder, "--clients", "2", "--output-json", str(out_file), *OURS]) == 0
    out, record = last_json(capsys)
    assert "start to /health 200, kernel caches empty, s" in out
    costs = {"start_cold_s", "start_warm_s", "idle_cpu_percent", "host_memory_gib"}
    # So short a run may have no sample of the lag, and answers that came in one piece.
    always = {
        "wall_s",
        "req_per_s",
        "out_tok_per_s",
        "ttft_ms_p50",
        "ttft_ms_p99",
        "e2e_ms_p50",
        "server_cpu_us_per_token",
    }
    for title in ("c3_8_4", "c3_8_4@50%"):
        found = {key.removeprefix(f"{title}.") for key in record["figures"] if key.startswith(f"{title}.")}
        assert always <= found <= set(WANTED)
        costs |= {f"{title}.{key}" for key in found}
    assert record["figures"].keys() == costs
    assert (record["failure"], record["num_processes"]) == (None, 1)
    closed, step = record["runs"]
    assert (closed["client_processes"], closed["out_tokens"], closed["rate_per_s"]) == (2, 18 * 4, None)
    assert step["rate_per_s"] == pytest.approx(closed["req_per_s"] / 2, rel=1e-3)
    assert json.loads(out_file.read_text()) == record


@pytest.mark.nightly
def test_repeated_starts_are_timed_and_give_one_answer(folders, capsys):
    assert main(["gpu", *folders, "--no-cold", "--workload", "--starts", "2", *OURS]) == 0
    _, record = last_json(capsys)
    figures = record["figures"]
    assert (figures["starts.failed"], figures["starts.distinct_answers"], record["start_failures"]) == (0, 1, [])
    assert 0 < figures["starts.s_p50"] <= figures["starts.s_max"]


def test_no_workload_begins_when_the_time_for_that_is_over():
    args = SimpleNamespace(begin_within=-1.0, idle_seconds=0.0, ladder="c3_8_4")
    session = Session(args, find_workloads(["c3_8_4"]))
    session._measure(None, SimpleNamespace(pid=os.getpid(), has_ended=lambda: False))
    assert (session.facts["left_out"], session.runs) == (["c3_8_4"], [])


def test_a_server_that_refuses_its_options_is_a_failure_with_its_words(folders, capsys):
    assert main(["gpu", *folders, "--no-cold", *OURS, "--no-such-option"]) == 1
    _, record = last_json(capsys)
    assert "no-such-option" in record["failure"]
    assert record["figures"] == {}


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--workload", "c99"], "no workload"),
        (["--clients", "0"], "--clients"),
        (["--tokenizer", "/no/such"], "no such file"),
        (["--ladder", "c9_8_4"], "must be one of the measured workloads"),
        (["--vocab-size", "258"], "vocabulary size 258"),
    ],
)
def test_gpu_refuses_before_it_starts_anything(folders, args, reason, capsys):
    assert main(["gpu", *folders, *args]) == 2
    assert reason in capsys.readouterr().err


def test_the_model_is_the_shape_with_another_vocabulary(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    write_model(tmp_path, 77, tmp_path / "model")
    assert json.loads((tmp_path / "model/config.json").read_text()) == TINY | {"vocab_size": 77}
