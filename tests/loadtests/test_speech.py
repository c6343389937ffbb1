"""The measurement of speech: arguments that do not fit are refused, and each system's speed is a figure."""

from __future__ import annotations

import json

import pytest

from loadtests.__main__ import main
from loadtests.engine.speech import shape, sounds
from loadtests.engine.speech.__main__ import engine_options

TINY = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 32, "encoder_layers": 1,
    "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 64, "vocab_size": 2000,
    "is_encoder_decoder": True,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "add --audio WAV, or --tokens N"),
        (["--tokens", "5", "--model", "nowhere"], "nowhere has no config.json"),
        (["--audio", "a.wav", "--beside", "whisper.cpp"], "add --ggml FILE"),
        (["--audio", "a.wav", "--files", "0"], "must be positive"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(argv, says, capsys):
    assert main(["speech", *argv]) == 2
    assert says in capsys.readouterr().err


def test_only_transformers_takes_random_weights(folder, capsys):
    assert main(["speech", "--model", str(folder), "--tokens", "5", "--beside", "faster-whisper"]) == 2
    assert "only transformers" in capsys.readouterr().err


def test_options_of_the_engine_are_read_as_those_of_an_llm():
    words = ["--quantization", "int8", "--max-num-seqs", "4", "--enforce-eager", "--dtype=float16"]
    assert engine_options(words) == {
        "quantization": "int8", "max_num_seqs": 4, "enforce_eager": True, "dtype": "float16",
    }  # fmt: skip


def test_audio_differs_between_files_and_rounds():
    whole = [sounds.generated(0.1, 0)]
    seen = {sound.tobytes() for number in range(3) for sound in sounds.of_round(whole, 4, number)}
    assert len(seen) == 12


def test_the_work_of_a_shape_is_counted_by_hand():
    small = TINY | {
        "d_model": 2,
        "encoder_ffn_dim": 3,
        "decoder_ffn_dim": 3,
        "max_source_positions": 5,
        "vocab_size": 7,
    }
    layer = 5 * (4 * 4 + 2 * 2 * 3) + 2 * 5 * 5 * 2  # products of weights, then of queries, keys and values
    convolutions = 10 * 3 * 80 * 2 + 5 * 3 * 2 * 2
    assert shape.encoder_flops(small) == 2 * (convolutions + layer)
    assert shape.step_bytes(small, 4) == 4 * (6 * 4 + 2 * 2 * 3 + 7 * 2)
    assert shape.row_bytes(small, 4) == 4 * 2 * 5 * 2


@pytest.mark.nightly
def test_each_system_is_a_figure(folder, capsys):
    argv = ["--model", str(folder), "--tokens", "5", "--seconds", "1", "--files", "1", "3", "--rounds", "1"]
    assert main(["speech", *argv, "--beside", "transformers", "--", "--num-kv-blocks", "512"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["figures"].keys() == {"oneloop.1", "transformers.1", "oneloop.3", "transformers.3"}
    assert min(result["figures"].values()) > 0
