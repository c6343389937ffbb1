"""A model cut for several devices: its parts hold the whole, read their own rows alone, and together compute what it does."""

from __future__ import annotations

import pytest
import torch
import transformers

from runtime.config import WeightPolicy
from runtime.models.load import load_model, opened
from runtime.models.registry import spec_from_config
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.sharding import cuts, deferred_sums, kept_whole, reduced_linears, sharded
from runtime.parallel.group import HostRank
from runtime.weights.fetch import resolve
from runtime.weights.rules import Cut, Parameter, Span, merge, plan, reduced
from runtime.weights.stream import TensorStream
from tests.equality.test_families import FAMILIES
from tests.runtime.models.checkpoints import checkpoint
from tests.runtime.models.paged import Paged
from tests.runtime.models.shard_group import Shards, all_alike
from tests.runtime.weights import gguf_models
from tests.runtime.weights.test_stream import Recorder

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "max_position_embeddings": 128,
}  # fmt: skip
MODELS = {
    "as many kv heads": transformers.LlamaConfig(**SIZES, num_key_value_heads=8, attention_bias=True, mlp_bias=True),
    "fewer kv heads, tied": transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "one kv head": transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8),
    "norms of each head, tied, in pairs": transformers.CohereConfig(**SIZES, num_key_value_heads=2, use_qk_norm=True),
    "transposed, two matrices": transformers.GPT2Config(n_embd=32, n_head=8, n_layer=2, vocab_size=VOCAB, n_positions=128),
    "experts": transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
    "experts with biases": transformers.GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=4, sliding_window=9
    ),
    "a shared expert": transformers.Qwen2MoeConfig(
        **SIZES, num_key_value_heads=2, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=4,
        num_experts_per_tok=2,
    ),
    "latents": transformers.DeepseekV3Config(
        **SIZES, num_key_value_heads=8, moe_intermediate_size=24, num_experts_per_tok=2, n_routed_experts=4, n_group=1,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=8,
    ),
}  # fmt: skip
TWELVE_HEADS = transformers.LlamaConfig(**SIZES | {"num_attention_heads": 12, "hidden_size": 48}, num_key_value_heads=3)
OPTIONS = {"dtype": "float32", "load_format": "auto", "seed": 0}


def quiet(progress) -> None:
    pass


@pytest.fixture(scope="module", params=MODELS)
def files(request, tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("model"), MODELS[request.param], 1)


def parameters(spec, files) -> dict[str, torch.Tensor]:
    """A matrix's bias by its own name."""
    found = {}
    with opened(spec, files, **OPTIONS, device="cpu", policy=None) as reader:
        for name, stored in reader.read(quiet):
            found[name] = stored.weight
            if stored.bias is not None:
                found[name.removesuffix("weight") + "bias"] = stored.bias
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_hold_the_whole(files, size):
    spec = spec_from_config(files.config)
    whole = parameters(spec, files)
    put_together = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    for rank in range(size):
        part = sharded(spec, rank, size)
        held, of_part = cuts(part), parameters(part, files)
        assert {name: tuple(tensor.shape) for name, tensor in of_part.items()} == {
            each.name: each.shape for each in part.parameters()
        }
        for name, values in of_part.items():
            cut = held.get(name, Cut(tuple(values.shape), (Span(0, len(values)),), None))
            if not cut.rows:
                assert not values.any()
                assert name.endswith("bias")
                continue
            rows = torch.cat([torch.arange(*span) for span in cut.rows])
            columns = slice(*cut.columns) if cut.columns is not None else slice(None)
            place = (rows, columns) if values.ndim == 2 else (rows,)
            put_together[name][place] = values
    assert all(torch.equal(put_together[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("name", ["fewer kv heads, tied", "latents"])
def test_eight_together_compute_what_the_whole_computes(name, tmp_path):
    check_together(checkpoint(tmp_path, MODELS[name], 1), 8)


@pytest.mark.parametrize("size", [2, 4])
def test_together_they_compute_what_the_whole_computes(files, size):
    check_together(files, size)


def check_together(files, size) -> None:
    whole = Paged(load_model(files, **OPTIONS, progress=quiet, max_model_len=128), 2, 64)
    shards = Shards(spec_from_config(files.config), files, size, lambda decoder: Paged(decoder, 2, 64))
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    for spans in ({0: ids[:33]}, {0: ids[33:34], 1: ids[3:20]}):
        expected = whole.step(spans)
        every = shards.run(lambda part, spans=spans: part.step(spans))
        for row in spans:
            assert all_alike([logits[row] for logits in every])
            torch.testing.assert_close(every[0][row], expected[row], rtol=1e-4, atol=1e-4)


def test_rows_that_stay_quantised_are_cut_too(tmp_path):
    """Q8_0, whose columns are cut where that leaves whole blocks, and turned into numbers where it does not."""
    gguf_models.make("llama", tmp_path / "model.gguf")
    files = resolve(str(tmp_path / "model.gguf"), None, quiet)
    spec, policy = spec_from_config(files.config), WeightPolicy("float32", keep_quantized=True)
    wide = parameters(spec, files)
    for rank in range(2):
        part = sharded(spec, rank, 2)
        with opened(part, files, **OPTIONS, device="cpu", policy=policy) as reader:
            formats = [reader.storage[f"model.layers.0.self_attn.{name}.weight"] for name in ("qkv_proj", "o_proj")]
            read = dict(reader.read(quiet))
        assert formats[1] == "float32"
        if formats[0] == "float32":
            pytest.skip("no kernel reads blocks here")
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        parts = read["model.layers.0.self_attn.qkv_proj.weight"]
        values = [dequantize(each.weight.numpy(), GGMLQuantizationType[each.format.name]) for each in parts]
        cut = cuts(part)["model.layers.0.self_attn.qkv_proj.weight"]
        rows = torch.cat([torch.arange(*span) for span in cut.rows])
        expected = wide["model.layers.0.self_attn.qkv_proj.weight"][rows]
        assert torch.equal(torch.cat([torch.from_numpy(each) for each in values]), expected)


def test_a_part_reads_no_rows_but_its_own():
    shapes = {"a": (8, 6), "b": (4, 6)}
    (load,) = plan([Parameter("ab", (12, 6), (8, 4))], (merge("a b", into="ab"),), shapes)
    own = Parameter("ab", (6, 3), (4, 2))
    cut = reduced(load, own, Cut((12, 6), (Span(4, 8), Span(10, 12)), Span(3, 6)))
    assert [(each.name, each.start, each.taken) for each in cut.shards] == [("a", 0, Span(4, 8)), ("b", 4, Span(2, 4))]
    checkpoint = Recorder(shapes)
    with TensorStream(checkpoint) as source:
        ((parameter, values),) = source.stream([cut], "float32", quiet)
    assert parameter == own
    assert values[:, 0].tolist() == [4, 5, 6, 7, 102, 103]
    assert values.shape == (6, 3)


@pytest.mark.parametrize(
    ("config", "size", "says"),
    [
        (MODELS["as many kv heads"], 3, "cut for 3 devices: 8 attention heads"),
        (MODELS["as many kv heads"], 16, "8 attention heads"),
        (transformers.LlamaConfig(**{**SIZES, "vocab_size": 95}), 2, "95 rows of the vocabulary"),
        (transformers.LlamaConfig(**{**SIZES, "intermediate_size": 50}), 4, "50 columns of an MLP"),
        (TWELVE_HEADS, 2, "3 kv heads"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_what_cannot_be_shared_out_is_refused_by_name(config, size, says):
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    spec = spec_from_config(config.to_dict())
    with pytest.raises(UnsupportedModel, match=says):
        sharded(spec, 0, size)


@pytest.mark.parametrize(
    ("family", "whole"),
    [
        ("mamba", {"Mamba"}),
        ("bamba", {"Mamba2"}),
        ("zamba 2", {"Attention", "Mamba2"}),
        ("qwen 3 next", {"Attention", "GatedDeltaNet"}),
        ("lfm2", {"ShortConv"}),
        ("olmo 2", {"Attention"}),
        ("bloom", {"Attention"}),
        ("llama", set()),
    ],
)
def test_mixers_that_do_not_fall_apart_by_heads_are_kept_whole(family, whole):
    config = FAMILIES[family].config()
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    part = sharded(spec_from_config({**config.to_dict(), "vocab_size": 96}), 1, 2)
    assert kept_whole(part) == whole
    assert not {name for name in reduced_linears(part) if name.endswith("o_proj")} or "Attention" not in whole


class Counted(HostRank):
    """Counts the sums that it takes by itself, and those with a norm."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.sums, self.normed = 0, 0

    def sum(self, x):
        self.sums += 1
        return super().sum(x)

    def add_rms_norm(self, x, residual, weight, eps):
        self.sums, self.normed = self.sums - 1, self.normed + 1
        return super().add_rms_norm(x, residual, weight, eps)


@pytest.mark.parametrize(
    ("name", "by_themselves", "with_norms"),
    [
        ("as many kv heads", 1, 4),  # the embedding; attention and MLP of two layers
        ("norms of each head, tied, in pairs", 3, 0),  # side by side: one sum a layer, which layer norms add
        ("experts with biases", 1, 4),
        ("a shared expert", 1, 4),  # with the other experts' sum
        ("latents", 1, 4),
    ],
)
def test_a_sum_is_taken_once_and_with_the_norm_behind_it(name, by_themselves, with_norms, tmp_path, monkeypatch):
    files = checkpoint(tmp_path, MODELS[name], 1)
    monkeypatch.setattr("tests.runtime.models.shard_group.HostRank", Counted)
    shards = Shards(spec_from_config(files.config), files, 2, lambda decoder: Paged(decoder, 1, 64))
    shards.run(lambda part: part.step({0: [3, 4, 5]}))
    for rank in shards._ranks:
        assert (rank.sums, rank.normed) == (by_themselves, with_norms)


@pytest.mark.parametrize("family", ["olmo 2", "gemma 3", "zamba 2", "bamba"])
def test_a_norm_takes_sums_only_of_what_are_parts_of_one(family):
    """Where norms stand behind blocks, or a block is computed whole, nothing is left for another norm."""
    config = FAMILIES[family].config()
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    part = sharded(spec_from_config({**config.to_dict(), "vocab_size": 96}), 1, 2)
    deferred = deferred_sums(part)
    reduced = {*reduced_linears(part), *(each.name for each in part.experts())}
    assert deferred.parts <= reduced
    assert bool(deferred.norms) == bool(deferred.parts)
    if family in ("olmo 2", "gemma 3"):
        assert not deferred.norms


def test_one_device_has_the_whole_and_ranks_are_checked():
    config = MODELS["as many kv heads"]
    config.architectures = ["LlamaForCausalLM"]
    spec = spec_from_config(config.to_dict())
    assert sharded(spec, 0, 1) is spec
    assert cuts(spec) == {}
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        sharded(spec, 2, 2)
