"""A checkpoint of a Llama so small that it is loaded in no time: random weights, and a tokenizer whose tokens are bytes. Imports
nothing of ours."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

WIDTH, INNER, LAYERS, HEADS = 32, 64, 2, 2
EOS = "<|eos|>"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write(folder: Path, seed: int) -> Path:
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": TEMPLATE}))
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": len(alphabet) + 1, "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "max_position_embeddings": 1024, "eos_token_id": len(alphabet), "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) / 4

    tensors = {"model.embed_tokens.weight": drawn(len(alphabet) + 1, WIDTH), "model.norm.weight": torch.ones(WIDTH)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {f"{name}.self_attn.{each}_proj.weight": drawn(WIDTH, WIDTH) for each in "qkvo"}
        tensors |= {f"{name}.mlp.{each}_proj.weight": drawn(INNER, WIDTH) for each in ("gate", "up")}
        tensors[f"{name}.mlp.down_proj.weight"] = drawn(WIDTH, INNER)
        tensors |= {f"{name}.{each}_layernorm.weight": torch.ones(WIDTH) for each in ("input", "post_attention")}
    save_file(tensors, folder / "model.safetensors")
    return folder
