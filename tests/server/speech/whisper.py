"""A tiny random Whisper of transformers, with the tokenizer of `tiny`, in a folder; its windows are 3 s long."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from pathlib import Path

import torch
import transformers

from server.config.server_config import ServerConfig
from server.process.load import load
from tests.server.speech.tiny import (
    DE,
    EN,
    END,
    FR,
    NO_TIMESTAMPS,
    PREVIOUS,
    START,
    TRANSCRIBE,
    TRANSLATE,
    VOCAB,
    speech_tokenizer,
)

WINDOW_S = 3
POSITIONS = 64


def written(folder: Path, seed: int = 0) -> transformers.WhisperForConditionalGeneration:
    """Write a model into `folder` and return it."""
    speech_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=80, max_source_positions=150, max_target_positions=POSITIONS,
        decoder_start_token_id=START, eos_token_id=END, pad_token_id=END, bos_token_id=END, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3)
    model.model.decoder.embed_positions.weight.data *= 6.0  # or the same token comes again and again
    model.model.decoder.layers[-1].encoder_attn.out_proj.weight.data *= 4.0
    advice = {
        "is_multilingual": True, "no_timestamps_token_id": NO_TIMESTAMPS, "return_timestamps": False,
        "lang_to_id": {"<|en|>": EN, "<|de|>": DE, "<|fr|>": FR}, "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        "suppress_tokens": [1, 2, *range(START, NO_TIMESTAMPS)], "begin_suppress_tokens": [220, END], "prev_sot_token_id": PREVIOUS,
        "max_initial_timestamp_index": 50, "max_length": POSITIONS,
    }  # fmt: skip
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=END, pad_token_id=END, bos_token_id=END, decoder_start_token_id=START, **advice
    )
    model.save_pretrained(folder)
    return model


@asynccontextmanager
async def loaded(folder: Path, **options):
    """The config and model of a process that serves `folder`."""
    config = ServerConfig(
        models=(str(folder),), device="cpu", dtype="float32", num_kv_blocks=256, access_log=False,
        served_model_name=("tiny",), **options,
    )  # fmt: skip
    model = await load(config, lambda progress: None, threading.Event())
    try:
        yield config, model
    finally:
        await model.engine.close()
