"""A sound, from a chat to the model's encoder and back: the answer is transformers' own, of sounds of several lengths."""

from __future__ import annotations

import base64
import threading

import pytest
import torch
import transformers

from server.config.server_config import ServerConfig
from server.models.lifecycle import Lifecycle
from server.process.load import load
from tests.server.conftest import running
from tests.server.media.processors import written
from tests.server.media.sounds import sine, wav

RATE, MAX_TOKENS = 16_000, 8
FIELDS = {"model": "tiny", "temperature": 0, "max_tokens": MAX_TOKENS, "return_token_ids": True}


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    """The processor of a tiny Qwen2-Audio, and the model."""
    folder = tmp_path_factory.mktemp("qwen2_audio")
    tiny = written("qwen2_audio", folder)
    tokenizer = tiny.processor.tokenizer
    config = transformers.Qwen2AudioConfig(
        text_config={
            "model_type": "qwen2", "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id,
        },
        audio_config={
            "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2,
            "encoder_attention_heads": 4, "num_mel_bins": 16, "max_source_positions": 100,
        },
        **{key: value for key, value in tiny.config.items() if key != "model_type"},
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.Qwen2AudioForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3 if parameter.ndim == 1 else 0.2)
    model.save_pretrained(folder)
    return tiny, model


@torch.inference_mode()
def answer(hearing, text: str, sounds: list) -> list[int]:
    tiny, model = hearing
    inputs = tiny.processor(text=[text], audio=sounds, return_tensors="pt", sampling_rate=RATE)
    found = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
    return found[0, inputs["input_ids"].shape[1] :].tolist()


async def test_answers_about_sounds_are_transformers_own(hearing):
    folder = str(hearing[0].folder)
    config = ServerConfig(
        models=(folder,), device="cpu", dtype="float32", max_model_len=512, num_kv_blocks=128, access_log=False,
        served_model_name=("tiny",),
    )  # fmt: skip
    loaded = await load(config, lambda progress: None, threading.Event())
    lifecycle = Lifecycle()
    lifecycle.ready(loaded)
    short, long = sine(0.4, RATE), sine(1.7, RATE)
    parts = [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(each, RATE)).decode(), "format": "wav"}}
        for each in (short, long)
    ]
    async with running(loaded.engine, loaded.tokenizer, lifecycle, config) as server:
        for sounds, given in (([short], parts[:1]), ([long, short], parts[::-1])):
            body = {"messages": [{"role": "user", "content": [*given, {"type": "text", "text": "What?"}]}]}
            found = await server.post("/v1/chat/completions", body | FIELDS)
            assert found.status_code == 200, found.text
            content = [*({"type": "audio"} for _ in sounds), {"type": "text", "text": "What?"}]
            text = hearing[0].processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
            expected = answer(hearing, text, [(each * 32767).round() / 32768 for each in sounds])
            assert found.json()["choices"][0]["token_ids"] == expected
            assert found.json()["usage"]["prompt_tokens_details"]["audio_tokens"] > 0
