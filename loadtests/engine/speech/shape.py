"""Folder of a speech model without weights, written from a shape (config files), and the amount of work of that shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtests.made_tokenizer import write_tokenizer

TIMESTAMPS = [f"<|{number * 0.02:.2f}|>" for number in range(1501)]
CONTROL = [
    "<|endoftext|>", "<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>",
    "<|nospeech|>", "<|notimestamps|>",
]  # fmt: skip


def write(shape: Path, folder: Path) -> None:
    """Write config.json, generation_config.json and a tokenizer of `shape` into `folder`. The end-of-text token is suppressed,
    so every window has the maximum number of tokens. Raises OSError, ValueError."""
    config = json.loads((shape / "config.json").read_text())
    last = [*CONTROL, *TIMESTAMPS]
    write_tokenizer(folder, config["vocab_size"], last)
    ids = {token: config["vocab_size"] - len(last) + place for place, token in enumerate(CONTROL)}
    end = ids["<|endoftext|>"]
    common = {
        "eos_token_id": end, "bos_token_id": end, "pad_token_id": end, "decoder_start_token_id": ids["<|startoftranscript|>"],
        "suppress_tokens": [*ids.values()], "begin_suppress_tokens": [end],
    }  # fmt: skip
    advice = {"is_multilingual": False, "no_timestamps_token_id": ids["<|notimestamps|>"], "return_timestamps": False}
    advice |= {"prev_sot_token_id": ids["<|startofprev|>"], "max_length": config["max_target_positions"]}
    (folder / "config.json").write_text(json.dumps(config | common))
    (folder / "generation_config.json").write_text(json.dumps(common | advice))


def encoder_flops(config: Mapping[str, Any]) -> float:
    """Return the floating-point operations of the encoder for one window. A multiplication and an addition count as two."""
    width, positions = config["d_model"], config["max_source_positions"]
    convolutions = 3 * width * (2 * config["num_mel_bins"] + width)
    layer = 4 * width**2 + 2 * width * config["encoder_ffn_dim"] + 2 * positions * width
    return 2.0 * positions * (convolutions + config["encoder_layers"] * layer)


def step_bytes(config: Mapping[str, Any], element_bytes: int) -> float:
    """Return the bytes of weights that one decode step reads: those of all layers and of the head."""
    width = config["d_model"]
    layer = 6 * width**2 + 2 * width * config["decoder_ffn_dim"]  # keys and values of the audio are computed once
    return float(element_bytes) * (config["decoder_layers"] * layer + config["vocab_size"] * width)


def row_bytes(config: Mapping[str, Any], element_bytes: int) -> float:
    """Return the bytes of one window's encoder keys and values, which each decode step of that window reads."""
    return 2.0 * element_bytes * config["decoder_layers"] * config["max_source_positions"] * config["d_model"]
