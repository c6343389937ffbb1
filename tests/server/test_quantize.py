"""`oneloop quantize`: what it asks for, what it says, and a tokenizer that is written for a model that came in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.cli import quantize
from server.config.server_options import ConfigError
from server.models.tokenizer import Tokenizer
from tests.runtime.weights import smollm2

FOUND = {
    "num_quantised": 14, "num_calibrated": 0, "left": ["lm_head", "a.gate"], "bytes_before": 1 << 20, "bytes_after": 1 << 18,
    "mean_loss": 0.0984,
}  # fmt: skip


def given(found, jobs):
    def run(job, display):
        jobs.append(job)
        return found

    return run


def test_it_says_what_was_written(capsys):
    jobs = []
    assert quantize.main(["m", "out", "--scheme", "w4a16"], given(FOUND, jobs)) == 0
    said = capsys.readouterr().out
    assert "14 matrices in w4a16" in said
    assert "9.8%" in said
    assert "not quantised: a.gate" in said
    assert "oneloop serve out" in said
    (job,) = jobs
    assert (job.model, job.out, job.scheme, job.text) == ("m", Path("out"), "w4a16", None)
    assert quantize.main(["m", "out", "--scheme", "fp8", "--json"], given(FOUND, jobs)) == 0
    assert json.loads(capsys.readouterr().out) == FOUND


def test_a_text_is_read_in_pieces(tmp_path):
    text, jobs = tmp_path / "text.txt", []
    text.write_text("A word and another. " * 400)
    options = ["--calibrate", str(text), "--calibration-tokens", "1100"]
    assert quantize.main(["m", "out", "--scheme", "w8a8", *options], given(FOUND, jobs)) == 0
    tokenizer = Tokenizer.from_gguf(smollm2.files().gguf.metadata)
    assert [len(piece) for piece in jobs[0].pieces(tokenizer, 8192)] == [512, 512, 76]
    assert [len(piece) for piece in jobs[0].pieces(tokenizer, 400)] == [400, 400, 300]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["m"], "OUT"), (["m", "o"], "--scheme"), (["m", "o", "--scheme", "w2"], "w2"),
        (["m", "o", "--scheme", "fp8", "--calibrate", "/nowhere"], "/nowhere"),
        (["m", "o", "--scheme", "fp8", "--calibration-tokens", "0"], "--calibration-tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        quantize.main(options, given(FOUND, []))


def test_a_model_that_cannot_be_read_is_an_exit_code(capsys):
    def run(job, display):
        raise ValueError("no such model")

    assert quantize.main(["m", "o", "--scheme", "fp8"], run) == 1
    assert "no such model" in capsys.readouterr().err


def test_a_tokenizer_of_a_file_is_the_same_in_a_folder(tmp_path):
    before = Tokenizer.from_gguf(smollm2.files().gguf.metadata)
    quantize.write_tokenizer(before, tmp_path)
    after = Tokenizer.from_folder(tmp_path)
    text = "Wörter, <|im_start|>user\n  and 123 more"
    assert after.encode(text) == before.encode(text)
    assert (after.bos_token_id, after.eos_token_id) == (before.bos_token_id, before.eos_token_id)
    assert after.chat_template == before.chat_template
