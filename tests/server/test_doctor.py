"""`oneloop doctor` and `--dry-run`: what is printed of findings and of a plan, and that both are true of this machine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from server.cli import doctor, dry_run
from server.config.server_config import ServerConfig
from server.models.lifecycle import LoadError
from server.process.plan import dry_run as plan

TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


def found(*findings):
    fits = [
        {"model": "A", "format": "bf16", "weights_bytes": 2**30, "kv_tokens": 1000, "tokens_per_s": 12.5, "fits": True},
        {"model": "B", "format": "bf16", "weights_bytes": 2**35, "kv_tokens": 0, "tokens_per_s": 0.4, "fits": False},
    ]
    return {
        "findings": list(findings), "memory_bytes": 2**32, "memory_bytes_per_s": 13e9, "fits": fits, "kernels": ["rope: k"],
    }  # fmt: skip


GOOD = {"topic": "memory", "text": "4 GiB", "state": "good", "mend": None}
MISSING = {"topic": "kernels", "text": "none", "state": "missing", "mend": "apt-get install g++"}


def test_what_is_missing_comes_with_what_mends_it_and_an_exit_code(capsys):
    assert doctor.main([], lambda: found(GOOD)) == 0
    assert "try:" not in capsys.readouterr().out
    assert doctor.main([], lambda: found(GOOD, MISSING)) == 1
    out = capsys.readouterr().out
    for words in ("try: apt-get install g++", "fits: A in bf16 (1.00 GiB)", "12.5 tokens/s", "oneloop models --fit"):
        assert words in out
    assert "B in" not in out


def test_the_kernel_of_each_operation_is_listed_to_whoever_asks(capsys):
    assert doctor.main([], lambda: found(GOOD)) == 0
    assert "rope: k" not in capsys.readouterr().out
    assert doctor.main(["--verbose"], lambda: found(GOOD)) == 0
    assert "rope: k" in capsys.readouterr().out


def test_programs_read_json(capsys):
    assert doctor.main(["--json"], lambda: found(GOOD)) == 0
    assert json.loads(capsys.readouterr().out) == found(GOOD)


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), (["--loud"], 2)])
def test_help_and_options_there_are_not(argv, code, capsys):
    assert doctor.main(argv, found) == code
    assert "usage: oneloop doctor" in "".join(capsys.readouterr())


def test_a_dry_run_tells_what_an_engine_would_be_and_loads_nothing(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = ServerConfig(models=(str(tmp_path),), device="cpu", num_kv_blocks=20, max_num_seqs=3, max_model_len=128)
    assert dry_run.main(config, plan) == 0
    *table, last = capsys.readouterr().out.splitlines()
    told = json.loads(last)
    assert (told["architecture"], told["device"], told["num_kv_blocks"]) == ("LlamaForCausalLM", "cpu", 20)
    assert (told["max_model_len"], told["max_num_seqs"], told["notes"]) == (128, 3, [])
    assert any("max num seqs" in line and line.endswith(" 3") for line in table)
    assert told["kernels"]
    assert not any("kernels" in line for line in table)
    assert dry_run.main(replace(config, log_level="debug"), plan) == 0
    assert any("kernels" in line for line in capsys.readouterr().out.splitlines()[:-1])


def test_a_dry_run_of_what_does_not_fit_says_so(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = ServerConfig(models=(str(tmp_path),), device="cpu", max_model_len=100_000)
    assert dry_run.main(config, plan) == 1
    assert "--max-model-len 100000 is more than the model's 512" in capsys.readouterr().err


def test_a_dry_run_of_no_model_says_so(tmp_path):
    with pytest.raises(LoadError, match="no such file"):
        plan(ServerConfig(models=(str(tmp_path / "none"),)), lambda progress: None)
