"""PEFT folders: what can be served is read as PEFT means it, and all else is refused with the name of what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.lora.inspect import inspect
from runtime.lora.peft_config import PeftConfig
from runtime.lora.peft_folder import read_adapter
from runtime.lora.store import AdapterStore
from runtime.lora.targets import find, targets_of
from runtime.models.registry import spec_from_config
from runtime.weights.rules import WeightsError

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
TARGETS = targets_of(spec_from_config(TINY))
Q, V, GATE = (f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj"))
SIZES = {Q: (16, 16), V: (8, 16), GATE: (24, 16)}


def tensors(module: str, rank: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    rows, columns = SIZES[module]
    name = f"base_model.model.{module}.lora_"
    return {f"{name}A.weight": torch.ones(rank, columns).to(dtype), f"{name}B.weight": torch.ones(rows, rank).to(dtype)}


def write(folder: Path, given: dict[str, torch.Tensor], **config) -> Path:
    save_file(given, folder / "adapter_model.safetensors")
    facts = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(facts | config))
    return folder


def read(folder: Path, max_rank: int = 8):
    return read_adapter(folder, TARGETS, max_rank)


def test_parts_of_merged_layers_are_targets_by_themselves(tmp_path):
    given = tensors(V) | tensors(Q, dtype=torch.bfloat16) | tensors(GATE, dtype=torch.float16)
    adapter = read(write(tmp_path, given))
    q, v = adapter.parts["model.layers.0.self_attn.qkv_proj"]
    (gate,) = adapter.parts["model.layers.0.mlp.gate_up_proj"]
    assert [(part.start, tuple(part.b.shape), part.scale) for part in (q, v, gate)] == [
        (0, (16, 2), 4.0), (24, (8, 2), 4.0), (0, (24, 2), 4.0),
    ]  # fmt: skip
    assert [part.a.dtype for part in (q, v, gate)] == [torch.bfloat16, torch.float32, torch.float16]
    assert adapter.max_rank == 2
    assert adapter.num_parameters == 2 * (32 + 24 + 40)
    assert adapter.config.base == "tiny"


def test_ranks_and_scales_follow_patterns_and_rslora(tmp_path):
    adapter = read(
        write(
            tmp_path, tensors(Q, 4) | tensors(V), use_rslora=True, rank_pattern={"q_proj": 4},
            alpha_pattern={r"layers\.0\.self_attn\.v_proj": 6},
        )
    )  # fmt: skip
    q, v = adapter.parts["model.layers.0.self_attn.qkv_proj"]
    assert (q.rank, q.scale) == (4, 8 / math.sqrt(4))
    assert (v.rank, v.scale) == (2, 6 / math.sqrt(2))


def test_a_pattern_s_key_begins_a_name_or_stands_behind_a_dot():
    config = PeftConfig(2, 8.0, rslora=False, rank_pattern={"proj": 5}, alpha_pattern={})
    assert config.rank_of("a.q_proj") == 2
    assert config.rank_of("a.proj") == config.rank_of("proj") == 5


def test_modules_are_found_with_a_model_more_or_less():
    assert find(TARGETS, Q) is find(TARGETS, Q.removeprefix("model.")) is not None
    assert find(TARGETS, f"other.{Q}") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora.*DoRA"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save.*lm_head"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "bias"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.*base weights"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"r": 0}, "r = 0"),
        ({"r": "2"}, "r = '2'"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": {"(": 2}}, "regular expression"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj = 0"),
        ({"rank_pattern": [1]}, "rank_pattern is not an object"),
    ],
)
def test_what_a_config_asks_for_in_vain_is_named(tmp_path, config, message):
    with pytest.raises(WeightsError, match=f"adapter_config.json: .*{message}"):
        read(write(tmp_path, tensors(Q), **config))


def wrong_shape() -> dict[str, torch.Tensor]:
    given = tensors(Q)
    return given | {name: torch.ones(2, 15) for name in given if "lora_A" in name}


def not_finite() -> dict[str, torch.Tensor]:
    given = tensors(Q)
    next(iter(given.values()))[1, 3] = torch.nan
    return given


ENDS = "base_model.model.model."


def at_the_ends() -> dict[str, torch.Tensor]:
    """Of embedding and head, with copies of their own matrices beside, as PEFT writes them."""
    head = "base_model.model.lm_head."
    return {
        f"{ENDS}embed_tokens.lora_embedding_A": torch.ones(2, 32), f"{ENDS}embed_tokens.lora_embedding_B": torch.ones(16, 2),
        f"{head}lora_A.weight": torch.ones(2, 16), f"{head}lora_B.weight": torch.ones(32, 2),
        f"{ENDS}embed_tokens.base_layer.weight": torch.ones(32, 16), f"{head}base_layer.weight": torch.ones(32, 16),
    }  # fmt: skip


def test_embedding_and_head_are_read_where_there_is_room(tmp_path):
    folder = write(tmp_path, at_the_ends())
    adapter = read(folder)
    assert {name: (part.a.shape, part.b.shape) for name, (part,) in adapter.parts.items()} == {
        "model.embed_tokens": ((2, 32), (16, 2)), "lm_head": ((2, 16), (32, 2)),
    }  # fmt: skip
    assert adapter.num_parameters == 2 * 2 * (32 + 16)
    none = targets_of(spec_from_config(TINY), vocabulary=False)
    with pytest.raises(WeightsError, match="on a GPU --lora-vocabulary enables"):
        read_adapter(folder, none, 8)
    for end in ("embed_tokens", "lm_head"):
        given = {name: each for name, each in at_the_ends().items() if end in name and "base_layer" not in name}
        with pytest.raises(
            WeightsError, match=f"{end} is no .*: on a GPU --lora-vocabulary|{end} .* on a GPU --lora-voc"
        ):
            read_adapter(write(tmp_path, given), none, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (wrong_shape(), r"q_proj.lora_A.weight is \[2, 15\] instead of \[2, 16\]"),
        (not_finite(), "q_proj.lora_A.weight holds numbers that are not finite"),
        (tensors(Q, 3), r"is \[3, 16\] instead of \[2, 16\]"),
        ({"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(2, 16)}, "has no lora_B"),
        (
            {f"base_model.model.model.layers.7.mlp.up_proj.lora_{half}.weight": torch.ones(2, 16) for half in "AB"},
            "layers.7.mlp.up_proj is not a linear layer of this model",
        ),
        (
            at_the_ends() | {f"{ENDS}embed_tokens.lora_embedding_A": torch.ones(2, 31)},
            r"is \[2, 31\] instead of \[2, 32\]",
        ),
        (
            at_the_ends() | {f"{ENDS}embed_tokens.base_layer.weight": torch.ones(33, 16)},
            r"\[33, 16\].*another vocabulary",
        ),
        (tensors(Q) | {f"base_model.model.{Q}.base_layer.weight": torch.ones(16, 16)}, "modules_to_save"),
        ({f"{ENDS}embed_tokens.base_layer.weight": torch.ones(32, 16)}, "embed_tokens has no lora_"),
        (
            {f"base_model.model.{Q}.lora_embedding_{half}": torch.ones(16, 16) for half in "AB"},
            "q_proj is not a token embedding",
        ),
        (
            {f"{ENDS}embed_tokens.lora_{half}.weight": torch.ones(16, 16) for half in "AB"},
            "embed_tokens is not a linear layer of this model",
        ),
        (
            tensors(Q) | {name.replace("model.layers", "layers"): each for name, each in tensors(Q).items()},
            "q_proj is adapted twice",
        ),
        (tensors(Q) | {f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(16)}, "DoRA"),
        ({f"base_model.model.{Q}.weight": torch.ones(16)}, "not a tensor of a PEFT LoRA adapter"),
        ({name: tensor.to(torch.float64) for name, tensor in tensors(Q).items()}, "F64"),
        ({}, "no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, given, message):
    with pytest.raises(WeightsError, match=message):
        read(write(tmp_path, given))


def test_a_rank_beyond_the_room_is_refused(tmp_path):
    with pytest.raises(WeightsError, match="rank 2, more than --max-lora-rank 1"):
        read(write(tmp_path, tensors(Q)), max_rank=1)


def test_pickles_and_missing_files_are_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"adapter_config\.json"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="pickle, which is never loaded"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"[1]", b'{"r": 2', b"[" * 100_000])
def test_broken_files_are_refused(tmp_path, content):
    write(tmp_path, tensors(Q))
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(WeightsError, match="adapter_config"):
        read(tmp_path)
    write(tmp_path, tensors(Q))
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="adapter_model"):
        read(tmp_path)


def test_a_folder_can_be_inspected_beside_a_model_or_alone(tmp_path):
    model, folder = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    folder.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    write(folder, tensors(Q) | tensors(V, dtype=torch.bfloat16), rank_pattern={"v_proj": 2})
    alone = inspect(str(folder), None, 8)
    assert (alone["targets"], alone["dtypes"], alone["refusal"]) == ({"q_proj": 1, "v_proj": 1}, ["BF16", "F32"], None)
    assert alone["num_parameters"] == 2 * (32 + 24)
    beside = inspect(str(folder), str(model), 8)
    assert (beside["fits"], beside["num_layers_adapted"], beside["max_rank"]) == (str(model), 1, 2)
    assert "more than --max-lora-rank 1" in inspect(str(folder), str(model), 1)["refusal"]
    write(folder, tensors(Q), use_dora=True)
    assert "DoRA" in inspect(str(folder), None, 8)["refusal"]


def test_a_folder_that_is_read_again_must_be_what_it_was(tmp_path):
    class Room:
        def __init__(self) -> None:
            self.kept: dict[int, object] = {}

        def prepared(self, parts):
            return parts

        def keep(self, key, adapter):
            self.kept[key] = adapter

        def drop(self, key):
            self.kept.pop(key, None)

    room = Room()
    store = AdapterStore([room], TARGETS, 8)
    write(tmp_path, tensors(Q), base_model_name_or_path="a longer name")
    assert store.read(1, str(tmp_path)).max_rank == 2
    store.drop(1)
    assert not room.kept
    store.read(1, str(tmp_path))
    write(tmp_path, tensors(Q) | tensors(V))
    with pytest.raises(WeightsError, match="have changed since the adapter was loaded"):
        store.read(1, str(tmp_path))
    store.read(2, str(tmp_path))  # loaded anew


MIXTURE = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12, "head_dim": 4,
}  # fmt: skip
EXPERTS = "model.layers.0.mlp.experts"


def stacked(module: str, rows: int, columns: int, rank: int = 2) -> dict[str, torch.Tensor]:
    """A and B of three experts' matrices [rows, columns]; A's numbers tell the expert and the rank, B's the rank and the expert."""
    a = torch.arange(3 * rank)[:, None].expand(-1, columns).float()
    b = torch.arange(rank * 3)[None, :].expand(rows, -1).float()
    name = f"base_model.model.{module}.lora_"
    return {f"{name}A.weight": a.contiguous(), f"{name}B.weight": b.contiguous()}


def test_a_parameter_of_experts_is_a_part_of_each(tmp_path):
    """A has an expert's ranks together, B a rank's experts, as PEFT reshapes them; which parameter it is the shapes tell."""
    targets = targets_of(spec_from_config(MIXTURE))
    given = stacked(f"{EXPERTS}.base_layer", 24, 16) | stacked(EXPERTS, 16, 12)
    folder = write(tmp_path, given, alpha_pattern={r"experts\.down_proj": 3})
    adapter = read_adapter(folder, targets, 8)
    for number in range(3):
        (gate_up,), (down,) = (adapter.parts[f"{EXPERTS}.{number}.{half}"] for half in ("gate_up", "down"))
        for part, size, scale in ((gate_up, 24, 4.0), (down, 16, 1.5)):
            assert (part.start, part.scale, len(part.b)) == (0, scale, size)
            assert part.a[:, 0].tolist() == [2 * number, 2 * number + 1]
            assert part.b[0].tolist() == [number, 3 + number]


def test_what_does_not_fit_experts_is_named(tmp_path):
    spec = spec_from_config(MIXTURE)
    for given, experts, message in (
        (stacked(EXPERTS, 24, 16, rank=3), True, r"\[9, 16\] instead of \[6, 16\]"),
        (stacked(EXPERTS, 24, 15), True, "experts has shapes that match none of gate_up_proj, down_proj"),
        (stacked(EXPERTS, 24, 16), False, "experts: adapters of experts are not supported here"),
        (
            tensors(Q) | stacked(f"{EXPERTS}.1.down_proj", 16, 12),
            False,
            "down_proj: adapters of experts are not supported here",
        ),
    ):
        with pytest.raises(WeightsError, match=message):
            read_adapter(write(tmp_path, given), targets_of(spec, experts=experts), 8)
