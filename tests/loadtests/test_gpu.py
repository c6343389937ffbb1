"""`gpu`: our server for real, on a CPU, started cold and warm and measured."""

from __future__ import annotations

import json

import pytest

from loadtests.__main__ import main
from loadtests.gpu import write_model
from tests.loadtests.test_commands import last_json
from tests.runtime.test_measure import TINY
from tests.server.tiny import VOCAB_SIZE, tiny_tokenizer

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
    shape, tokenizer = tmp_path / "tiny", tmp_path / "tokenizer"
    shape.mkdir()
    tokenizer.mkdir()
    (shape / "config.json").write_text(json.dumps(TINY))
    tiny_tokenizer()._backend.save(str(tokenizer / "tokenizer.json"))
    common = ["--model-shape", str(shape), "--tokenizer", str(tokenizer), "--vocab-size", str(VOCAB_SIZE)]
    return [*common, "--logs", str(tmp_path / "logs"), "--idle-seconds", "0.1", "--workload", "c3_8_4"]


def test_one_command_starts_our_server_twice_and_takes_every_figure(folders, tmp_path, capsys):
    out_file = tmp_path / "records.jsonl"
    assert main(["gpu", *folders, "--clients", "2", "--output-json", str(out_file), *OURS]) == 0
    out, record = last_json(capsys)
    assert "start to /health 200, kernel caches empty, s" in out
    always = {
        "start_cold_s", "start_warm_s", "idle_cpu_percent", "host_memory_gib", "c3_8_4.wall_s", "c3_8_4.out_tok_per_s",
        "c3_8_4.ttft_ms_p50", "c3_8_4.server_cpu_us_per_token",
    }  # fmt: skip
    # So short a run may have no sample of the lag, and answers that came in one piece.
    assert always <= record["figures"].keys() <= always | {"c3_8_4.loop_lag_ms_p99", "c3_8_4.tpot_ms_p50"}
    assert (record["failure"], record["num_processes"]) == (None, 1)
    assert (record["runs"][0]["client_processes"], record["runs"][0]["out_tokens"]) == (2, 18 * 4)
    assert json.loads(out_file.read_text()) == record


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
    ],
)
def test_gpu_refuses_before_it_starts_anything(folders, args, reason, capsys):
    assert main(["gpu", *folders, *args]) == 2
    assert reason in capsys.readouterr().err


def test_the_model_is_the_shape_with_another_vocabulary(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    write_model(tmp_path, 77, tmp_path / "model")
    assert json.loads((tmp_path / "model/config.json").read_text()) == TINY | {"vocab_size": 77}
