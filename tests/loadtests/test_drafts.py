"""`drafts`: the engine for real, on a CPU, with and without guessed tokens, in the processes that the command starts."""

from __future__ import annotations

import json

import pytest

from loadtests.__main__ import main
from tests.loadtests.test_commands import last_json

SMALL = [
    "--device",
    "cpu",
    "--prompt-tokens",
    "9",
    "--decode-tokens",
    "40",
    "--repeat",
    "1",
    "--kv-cache-bytes",
    "4194304",
]
GUESSES = '{"method": "ngram", "num_speculative_tokens": 3, "synthetic_acceptance": 1.0, "adaptive": false}'


@pytest.mark.nightly
def test_steps_with_right_guesses_bring_four_tokens_a_row_beside_one(model, tmp_path, capsys):
    out_file = tmp_path / "records.jsonl"
    args = ["drafts", "--model", str(model), "--batch", "1", "3", "--config", GUESSES, "--output-json", str(out_file)]
    assert main([*args, "--", *SMALL]) == 0
    out, record = last_json(capsys)
    assert "x plain" in out
    plain, guessed = record["details"]
    for batch in ("1", "3"):
        assert plain[batch]["tokens_a_step"] == 1
        assert 3 < guessed[batch]["tokens_a_step"] <= 4  # a last step may be cut by the end of the text
    assert {"steps_ms.plain.1", "steps_ms.1.3", "tok_per_s_ratio.1.3"} <= record["figures"].keys()
    assert json.loads(out_file.read_text()) == record


@pytest.mark.nightly
def test_an_option_that_the_engine_refuses_fails_the_command(model, capsys):
    assert main(["drafts", "--model", str(model), "--batch", "1", "--config", '{"method": "x"}', "--", *SMALL]) == 1
    assert "steps_ms.plain.1" in last_json(capsys)[1]["figures"]


def test_a_folder_without_a_model_is_no_measurement(tmp_path, capsys):
    assert main(["drafts", "--model", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_head_beside_the_model_guesses_at_its_own_speed(model, tmp_path, capsys):
    """Of a shape that suits the model's."""
    said = json.loads((model / "config.json").read_text())
    head = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": 100,
    }
    head |= {"eagle_aux_hidden_state_layer_ids": [0, said["num_hidden_layers"]]}
    (tmp_path / "config.json").write_text(json.dumps(said | head))
    args = ["drafts", "--model", str(model), "--batch", "2", "--method", "eagle3", "--drafts-by", str(tmp_path)]
    assert main([*args, "--", *SMALL]) == 0
    _, record = last_json(capsys)
    plain, guessed, _ = record["details"]
    assert plain["2"]["tokens_a_step"] == 1 < guessed["2"]["tokens_a_step"]
    assert [json.loads(config)["method"] for config in record["configs"]] == ["eagle3"] * 2
