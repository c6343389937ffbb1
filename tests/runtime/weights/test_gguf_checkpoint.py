from __future__ import annotations

import struct

import gguf as gguf_package
import numpy as np
import pytest
import torch

from runtime.weights.gguf import GgufFile
from runtime.weights.gguf_checkpoint import GgufCheckpoint
from runtime.weights.gguf_config import config_from_gguf, generation_config_from_gguf
from runtime.weights.rules import WeightsError
from tests.runtime.weights import smollm2
from tests.runtime.weights.gguf_bytes import gguf, key, string, tensor
from tests.runtime.weights.gguf_models import FAMILIES, as_converted, make


def read(checkpoint: GgufCheckpoint, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
    shape = checkpoint.shapes[name]
    rows = np.empty(((shape[0] if stop is None else stop) - start, *shape[1:]), np.float32)
    checkpoint.read_rows(name, start, rows)
    return torch.from_numpy(rows)


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    model = make(request.param, tmp_path / "model.gguf")
    return model, GgufFile(tmp_path / "model.gguf")


def test_names_and_rows_are_those_of_the_original(family):
    model, file = family
    checkpoint = GgufCheckpoint(file)
    originals = as_converted(model)
    assert set(checkpoint.shapes) == set(originals)
    for name, weight in originals.items():
        torch.testing.assert_close(read(checkpoint, name), weight, rtol=0, atol=3e-7 if "norm" in name else 0.0)


def test_rows_can_be_read_from_the_middle_of_a_head(family):
    model, file = family
    checkpoint = GgufCheckpoint(file)
    names = [f"model.layers.1.self_attn.{kind}.weight" for kind in ("k_proj", "qkv_proj", "kv_b_proj")]
    (name,) = [name for name in names if name in checkpoint.shapes]
    for start, stop in ((0, 1), (3, 5), (7, 16), (9, 10)):
        assert torch.equal(read(checkpoint, name, start, stop), model.state_dict()[name][start:stop])


def test_the_config_is_that_of_the_original(family):
    model, file = family
    config, original = config_from_gguf(file), model.config
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    ):  # fmt: skip
        assert config[name] == getattr(original, name), name
    assert config["architectures"] == [type(model).__name__]
    rope = original.rope_parameters.get("full_attention", original.rope_parameters)
    assert config["rope_theta"] == rope["rope_theta"]
    assert config["rms_norm_eps"] == pytest.approx(original.rms_norm_eps)
    assert config["attention_bias"] == getattr(original, "attention_bias", False)
    if config["architectures"][0].startswith("Deepseek"):
        names = (
            "kv_lora_rank",
            "q_lora_rank",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "v_head_dim",
            "n_group",
            "topk_group",
        )
        assert {name: config[name] for name in names} == {name: getattr(original, name) for name in names}
    else:
        assert config["head_dim"] == getattr(original, "head_dim", 8)


def test_half_precision_is_the_dequantised_value_rounded(family):
    _, file = family
    checkpoint = GgufCheckpoint(file)
    name = "model.layers.0.self_attn.o_proj.weight"
    exact = read(checkpoint, name)
    for numpy_type, torch_type in ((np.uint16, torch.bfloat16), (np.float16, torch.float16)):
        out = np.empty(checkpoint.shapes[name], numpy_type)
        checkpoint.read_rows(name, 0, out)
        assert torch.equal(torch.from_numpy(out).view(torch_type), exact.to(torch_type))


@pytest.mark.nightly
def test_every_weight_of_smollm2_is_transformers_own():
    checkpoint = GgufCheckpoint(smollm2.files().gguf)
    theirs = smollm2.read_by_transformers().state_dict()
    assert set(theirs) - set(checkpoint.shapes) == {"lm_head.weight"}
    for name in checkpoint.shapes:
        assert torch.equal(read(checkpoint, name), theirs[name]), name


@pytest.mark.nightly
def test_the_config_of_smollm2_is_transformers_own():
    ours, theirs = smollm2.files().config, smollm2.read_by_transformers().config
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "rms_norm_eps"):
        assert ours[name] == getattr(theirs, name), name
    assert ours["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert ours["tie_word_embeddings"]


@pytest.mark.nightly
def test_what_other_tests_take_for_transformers_smollm2_is_that():
    made, read = smollm2.theirs(), smollm2.read_by_transformers()
    for tensors in ("state_dict", "named_buffers"):
        ours, theirs = dict(getattr(made, tensors)()), dict(getattr(read, tensors)())
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# --- metadata that is odd, or wrong --------------------------------------------------------------------------------

UINT32, FLOAT32 = 4, 6
PLAIN = {
    "embedding_length": (UINT32, 64), "feed_forward_length": (UINT32, 96), "block_count": (UINT32, 2),
    "context_length": (UINT32, 128), "attention.head_count": (UINT32, 4),
    "attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
}  # fmt: skip


def config_of(tmp_path, changes=None, *, architecture="llama", keys=(), tensors=(), data=b""):
    values = {name: value for name, value in {**PLAIN, **(changes or {})}.items() if value is not None}
    encoded = [key("general.architecture", 8, string(architecture)), *keys]
    for name, (code, value) in values.items():
        raw = string(value) if code == 8 else struct.pack("<I" if code == UINT32 else "<f", value)
        encoded.append(key(f"{architecture}.{name}", code, raw))
    embedding = [tensor("token_embd.weight", [64, 5])] if tensors is not None else []
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(encoded, [*embedding, *(tensors or ())], bytes(4 * 64 * 5) + data))
    with GgufFile(path) as file:
        return config_from_gguf(file) | {"generation": generation_config_from_gguf(file)}


def test_absent_values_take_their_defaults(tmp_path):
    config = config_of(tmp_path)
    assert (config["num_key_value_heads"], config["head_dim"], config["rope_theta"]) == (4, 16, 10000.0)
    assert config["vocab_size"] == 5
    assert config["tie_word_embeddings"]
    assert config["generation"] == {}


def test_a_head_of_its_own_unties_the_embedding(tmp_path):
    assert not config_of(tmp_path, tensors=[tensor("output.weight", [64, 5])])["tie_word_embeddings"]


def test_llama3_scaling_comes_from_its_tensor(tmp_path):
    factors = np.arange(1, 9, dtype=np.float32)
    config = config_of(tmp_path, tensors=[tensor("rope_freqs.weight", [8], offset=4 * 64 * 5)], data=factors.tobytes())
    assert config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}


def test_yarn_scaling_comes_from_metadata(tmp_path):
    config = config_of(
        tmp_path,
        {
            "rope.scaling.type": (8, "yarn"),
            "rope.scaling.factor": (FLOAT32, 4.0),
            "rope.scaling.original_context_length": (UINT32, 32),
        },
    )
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


LATENT = {
    "expert_count": (UINT32, 4), "expert_used_count": (UINT32, 2), "expert_shared_count": (UINT32, 1),
    "attention.kv_lora_rank": (UINT32, 16), "rope.dimension_count": (UINT32, 8),
}  # fmt: skip


def test_older_files_of_deepseek_say_only_one_size_of_heads(tmp_path):
    sizes = {"attention.key_length": (UINT32, 24), "attention.value_length": (UINT32, 12)}
    config = config_of(tmp_path, LATENT | sizes, architecture="deepseek2")
    assert (config["qk_nope_head_dim"], config["v_head_dim"], config["n_group"]) == (16, 12, 1)
    newer = {"attention.key_length_mla": (UINT32, 20), "attention.value_length_mla": (UINT32, 10)}
    config = config_of(tmp_path, LATENT | sizes | newer, architecture="deepseek2")
    assert (config["qk_nope_head_dim"], config["v_head_dim"]) == (12, 10)


def test_keys_of_latents_need_their_values(tmp_path):
    path = tmp_path / "model.gguf"
    keys = [
        key("general.architecture", 8, string("deepseek2")),
        key("deepseek2.expert_count", UINT32, struct.pack("<I", 4)),
    ]
    path.write_bytes(gguf(keys, [tensor("blk.0.attn_k_b.weight", [4, 4, 2])], bytes(4 * 32)))
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_k_b\.weight has no matching tensor of values"):
        GgufCheckpoint(GgufFile(path))


def test_a_window_makes_a_llama_a_mistral(tmp_path):
    config = config_of(tmp_path, {"attention.sliding_window": (UINT32, 64)})
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 64)


def test_ends_of_turn_are_ends_too(tmp_path):
    ids = {"bos": 1, "eos": 2, "eot": 7, "eom": 2}
    keys = [key(f"tokenizer.ggml.{name}_token_id", UINT32, struct.pack("<I", value)) for name, value in ids.items()]
    assert config_of(tmp_path, keys=keys)["generation"] == {"bos_token_id": 1, "eos_token_id": [2, 7]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_count": None}, "block_count is None"),
        ({"block_count": (8, "many")}, "block_count is 'many'"),
        ({"attention.head_count": (UINT32, 0)}, "attention.head_count is 0"),
        ({"attention.layer_norm_rms_epsilon": None}, "epsilon is None"),
        ({"attention.value_length": (UINT32, 8)}, "differ in size from their keys"),
        ({"rope.dimension_count": (UINT32, 8)}, "part of the head"),
        ({"expert_count": (UINT32, 8)}, "expert_used_count is None"),
    ],
)
def test_metadata_that_cannot_be_served_is_named(tmp_path, changes, says):
    with pytest.raises(WeightsError, match=says) as caught:
        config_of(tmp_path, changes)
    assert "model.gguf" in str(caught.value)


def test_other_architectures_and_split_files_are_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"'bloom' is not supported; supported: llama, qwen2, qwen3"):
        config_of(tmp_path, architecture="bloom")
    with pytest.raises(WeightsError, match="a mixture of experts is not supported in GGUF architecture 'qwen3'"):
        config_of(tmp_path, {"expert_count": (UINT32, 8)}, architecture="qwen3")
    with pytest.raises(WeightsError, match="a model without experts is not supported in GGUF architecture 'qwen3moe'"):
        config_of(tmp_path, architecture="qwen3moe")
    with pytest.raises(WeightsError, match="split over 3 files"):
        config_of(tmp_path, keys=[key("split.count", 2, struct.pack("<H", 3))])
    with pytest.raises(WeightsError, match="no token_embd"):
        config_of(tmp_path, tensors=None)


def test_unsupported_tensor_types_are_refused_before_reading(tmp_path):
    path = tmp_path / "model.gguf"
    odd = [tensor(f"blk.{i}.attn_v.weight", [32, 2], code=20, offset=64 * i) for i in range(3)]
    path.write_bytes(gguf([key("general.architecture", 8, string("llama"))], odd, bytes(200)))
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_v\.weight is IQ4_NL.*2 more"):
        GgufCheckpoint(GgufFile(path))


def test_rows_as_stored_are_in_the_same_order(family):
    """Rows moved as packed bytes decode to the rows that reading as float32 gives."""
    checkpoint = GgufCheckpoint(family[1])
    name = next(name for name in checkpoint.shapes if any(q in name for q in ("q_proj", "qkv_proj", "q_a_proj")))
    assert checkpoint.types[name] == "Q8_0"
    rows, width = checkpoint.shapes[name]
    raw = checkpoint.read_stored(name, 0, rows)["weight"]
    assert raw.nbytes == checkpoint.stored_bytes(name)
    values = gguf_package.quants.dequantize(raw, gguf_package.GGMLQuantizationType.Q8_0)
    assert values.shape == (rows, width)
    assert torch.equal(torch.from_numpy(values), read(checkpoint, name))
    assert np.array_equal(checkpoint.read_stored(name, 3, 8)["weight"], raw[3:8])
