"""Who computes a model: our own decoder where there is one, transformers' modules where they can, nobody else, and why."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ops
from runtime.config import WeightPolicy
from runtime.models import implementation
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.model import UnsupportedModel
from runtime.models.through_transformers import agreement
from runtime.models.through_transformers.spec import TransformersSpec
from runtime.weights.fetch import resolve
from runtime.weights.rules import WeightsError
from tests.runtime.models.paged import Paged

SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
IDS = [5, 9, 60, 0, 33, 12]


def config(model_type: str, architecture: str, **values):
    return SMALL | {"model_type": model_type, "architectures": [architecture]} | values


ARCEE = config("arcee", "ArceeForCausalLM")
LLAMA = config("llama", "LlamaForCausalLM", rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu")


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(2)
    theirs = transformers.ArceeForCausalLM(transformers.ArceeConfig(**SMALL, initializer_range=0.3))
    theirs.save_pretrained(tmp_path)
    return tmp_path


def load(folder, **options):
    files = resolve(str(folder), None, lambda progress: None)
    spec = implementation.describe(files.config)
    defaults = {
        "dtype": "float32", "load_format": "auto", "seed": 0, "progress": lambda progress: None,
        "max_model_len": spec.max_model_len, "device": "cpu", "weights": WeightPolicy("float32"),
    }  # fmt: skip
    return implementation.load(spec, files, **defaults | options)


@pytest.mark.parametrize(
    ("written", "sizes"),
    [
        ({}, None),
        ({"matryoshka_dimensions": [8, 16]}, (8, 16)),
        ({"is_matryoshka": True}, ()),
    ],
)
@pytest.mark.parametrize(
    "model",
    [LLAMA, ARCEE, config("bert", "BertModel"), config("electra", "ElectraModel"), config("albert", "AlbertModel")],
    ids=lambda model: model["model_type"],
)
def test_sizes_that_embeddings_may_be_cut_to_are_read_whatever_computes_the_model(model, written, sizes):
    assert implementation.describe(model | written).pooler_info.matryoshka_dimensions == sizes


@pytest.mark.parametrize(
    "model", [LLAMA, ARCEE, config("electra", "ElectraModel")], ids=lambda each: each["model_type"]
)
def test_sizes_that_are_none_are_refused_whatever_computes_the_model(model):
    with pytest.raises(UnsupportedModel, match="matryoshka_dimensions is 8, not a list of positive integers"):
        implementation.describe(model | {"matryoshka_dimensions": 8})


def logits(model) -> torch.Tensor:
    return Paged(model, 1, 16).step({0: IDS})[0]


def change(folder, **tensors):
    """Rewrite the weights: None drops a tensor."""
    path = folder / "model.safetensors"
    weights = {**load_file(path), **{name.replace("__", "."): value for name, value in tensors.items()}}
    save_file({name: value for name, value in weights.items() if value is not None}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "wanted", "kind"),
    [
        (LLAMA, "auto", DecoderSpec),
        (LLAMA, "native", DecoderSpec),
        (LLAMA, "transformers", TransformersSpec),
        (ARCEE, "auto", TransformersSpec),
        (ARCEE, "transformers", TransformersSpec),
        (LLAMA | {"hidden_act": "mish"}, "auto", TransformersSpec),
    ],
)
def test_auto_prefers_our_own_and_falls_back_with_a_line_in_the_log(changes, wanted, kind, caplog):
    caplog.set_level(logging.INFO)
    spec = implementation.describe(changes, wanted)
    assert type(spec) is kind
    assert len(spec.memory_kinds()) == 2
    assert ("runs through transformers" in caplog.text) == (kind is TransformersSpec)
    assert ("hidden_act 'mish' is not supported" in caplog.text) == (changes.get("hidden_act") == "mish")


BART = {
    "model_type": "bart", "architectures": ["BartForCausalLM"], "is_encoder_decoder": True, "d_model": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "wanted", "says"),
    [
        (ARCEE, "native", "ArceeForCausalLM is not supported natively"),
        (ARCEE | {"architectures": ["ArceForCausalLM"]}, "auto", "no causal LM of this name; the nearest.*ArceeForCausalLM"),
        (config("mamba2", "Mamba2ForCausalLM"), "transformers", "more than attention"),
        (config("rwkv", "RwkvForCausalLM"), "auto", "RwkvForCausalLM is not supported.*more than attention"),
        (config("lfm2", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"]), "transformers", r"attention \(conv\)"),
        (BART, "auto", "it is an encoder-decoder"),
        (config("bloom", "BloomForCausalLM"), "transformers", "its attention is code of its own"),
        (config("moon", "MoonForCausalLM", auto_map={"AutoModel": "x.Y"}), "auto", "repository brings.*is never run"),
        (config("ultravox", "UltravoxModel", auto_map={"AutoModel": "x.Y"}), "auto", "UltravoxModel is not supported: .*never run"),
        (config("phi4mm", "Phi4MMForCausalLM"), "auto", "nearest that is: Phi4MultimodalForCausalLM, the same model"),
        (config("internvl_chat", "InternVLChatModel"), "auto", "nearest that is: InternVLForConditionalGeneration, the same"),
        (config("aria", "AriaForConditionalGeneration"), "auto", "AriaForConditionalGeneration is not supported: "),
        (config("bert", "BertLMHeadModel"), "auto", "neither causal nor a sliding window"),
        (config("opt", "OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32), "transformers", "computed apart from its layers"),
        (config("jetmoe", "JetMoeForCausalLM"), "auto", "what they do depends on the values they compute"),
        (config("doge", "DogeForCausalLM"), "auto", "it uses an attention mask of its own"),
        (config("xmod", "XmodForCausalLM"), "auto", "Input language unknown"),
        (config("longcat_flash", "LongcatFlashForCausalLM", head_dim=8), "auto", "something in its config is missing, or does"),
        (config("mpt", "MptForCausalLM"), "transformers", "its attention is code of its own"),
        (ARCEE | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "auto", "depend on other"),
        (ARCEE | {"max_position_embeddings": None}, "auto", "max_position_embeddings"),
        (ARCEE | {"hidden_size": "many"}, "auto", "transformers cannot read its config"),
        (ARCEE | {"model_type": "arc"}, "auto", "has no model_type 'arc'"),
        (ARCEE | {"quantization_config": {"quant_method": "torchao"}}, "auto", "quantised with 'torchao'"),
        (LLAMA | {"quantization_config": {"quant_method": "hqq"}}, "auto", "^weights quantised with 'hqq'"),
        (LLAMA | {"hidden_size": "many"}, "auto", "not a count of.*; nor does it run through transformers"),
        (LLAMA | {"architectures": []}, "auto", "names no model class"),
    ],
)  # fmt: skip
def test_what_nobody_can_serve_is_refused_with_the_reason(changes, wanted, says):
    with pytest.raises(UnsupportedModel, match=says):
        implementation.describe(changes, wanted)


INTERNALS = ("object has no attribute", "Error:", "_Given", "meta tensor", "strides")


@pytest.mark.parametrize(
    "architecture", ["AfmoeForCausalLM", "JetMoeForCausalLM", "Llama4ForCausalLM", "OPTForCausalLM"]
)
def test_a_refusal_shows_nothing_of_the_inner_trouble_of_libraries(architecture):
    """Sizes that do not fit each other, so that something breaks in the middle of modules."""
    kind = {"AfmoeForCausalLM": "afmoe", "JetMoeForCausalLM": "jetmoe", "Llama4ForCausalLM": "llama4_text"}.get(
        architecture, "opt"
    )
    with pytest.raises(UnsupportedModel) as caught:
        implementation.describe(
            config(kind, architecture, num_key_value_heads=3, num_attention_heads=4), "transformers"
        )
    assert not [each for each in INTERNALS if each in str(caught.value)]
    assert str(caught.value).startswith(f"{architecture} does not run through transformers: ")


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "runtime.models.through_transformers.describe", None)
    monkeypatch.delattr("runtime.models.through_transformers.describe", raising=False)
    with pytest.raises(UnsupportedModel, match=r"pip install 'transformers>=5\.23,<6'"):
        implementation.describe(ARCEE)


def test_the_list_of_architectures_says_who_computes_each():
    listed = dict(implementation.supported())
    assert listed["LlamaForCausalLM"] == listed["BloomForCausalLM"] == "native"
    assert listed["ArceeForCausalLM"] == listed["BioGptForCausalLM"] == "transformers"
    assert not listed.keys() & {"BartForCausalLM", "BertLMHeadModel", "RwkvForCausalLM", "Lfm3ForCausalLM"}


def test_tensors_that_do_not_fit_are_named(folder):
    change(
        folder,
        model__norm__weight=None,
        model__layers__0__mlp__up_proj__weight=torch.zeros(3, 5),
        model__layers__7__mlp__up_proj__weight=torch.zeros(48, 32),
    )
    with pytest.raises(WeightsError) as caught:
        load(folder)
    said = str(caught.value)
    assert "missing: model.norm.weight" in said
    assert "wrong shape: model.layers.0.mlp.up_proj.weight is [3, 5] instead of [48, 32]" in said
    assert "not part of this architecture: model.layers.7.mlp.up_proj.weight" in said


def test_16_bit_weights_stay_so_where_a_kernel_multiplies_them(folder):
    exact = logits(load(folder))
    change(folder, **{
        name.replace(".", "__"): value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()
    })  # fmt: skip
    wide = load(folder)
    stored = load(folder, weights=WeightPolicy("stored"))
    assert torch.nn.functional.cosine_similarity(logits(wide), exact).min() > 0.99
    torch.testing.assert_close(logits(stored), logits(wide), rtol=1e-4, atol=1e-4)
    refusal = ops.linear_refusal([ops.WeightFormat("bfloat16")], torch.float32, torch.device("cpu"))
    assert (stored.weights_bytes < wide.weights_bytes) == (refusal is None)


def test_weights_may_be_kept_in_fewer_bits_than_activations(folder, monkeypatch):
    """As --dtype bfloat16 keeps them on a CPU: rounding them is no reason to refuse a model, computing otherwise still is."""
    exact, rounded = (logits(load(folder, weights=WeightPolicy(numbers))) for numbers in ("float32", "bfloat16"))
    assert torch.nn.functional.cosine_similarity(rounded, exact).min() > 0.99
    assert not torch.equal(rounded, exact)
    compute_among_others_otherwise(monkeypatch)
    with pytest.raises(UnsupportedModel, match="computes otherwise than alone"):
        load(folder, weights=WeightPolicy("bfloat16"))


def test_a_step_that_samples_nothing_has_no_logits(folder):
    model = load(folder)
    hidden = model.forward(Paged(model, 1, 16).next({0: IDS}))
    none = model.compute_logits(hidden, torch.empty(0, dtype=torch.int64))
    assert none.shape == (0, model.spec.vocab_size)
    assert none.dtype == model.compute_logits(hidden).dtype


def test_experts_of_odd_sizes_run(tmp_path):
    """Their rows are no multiples of 16 bytes, which torch's kernel for groups of them asks for."""
    torch.manual_seed(2)
    theirs = transformers.AfmoeForCausalLM(
        transformers.AfmoeConfig(
            **SMALL, head_dim=8, moe_intermediate_size=13, num_experts=4, num_experts_per_tok=2, num_dense_layers=1,
            initializer_range=0.3,
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path)
    with torch.inference_mode():
        theirs.set_experts_implementation("eager")
        expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(load(tmp_path)), expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_is_refused_once_it_is_loaded_has_both_reasons(folder, monkeypatch):
    """The one why it is not our own to compute, and the one why transformers' modules are not."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "mish",
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, hidden_act="mish")).save_pretrained(folder)
    path.write_text(json.dumps(values))
    monkeypatch.setattr(agreement, "_TOLERANCE", {"float32": 0.0})
    says = "^config: hidden_act 'mish' is not supported.*; nor does it run through transformers: in steps of several"
    with pytest.raises(UnsupportedModel, match=says):
        load(folder)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("rope", "max_model_len", "says"),
    [
        (LONGROPE, 33, True),
        (LONGROPE, 32, False),
        (LONGROPE | {"long_factor": [1.0] * 4}, 33, False),
        (None, 33, False),
    ],
)
def test_the_log_says_that_short_contexts_are_turned_as_long_ones(tmp_path, caplog, rope, max_model_len, says):
    values = config("phi3", "Phi3ForCausalLM", original_max_position_embeddings=32, rope_parameters=rope)
    (tmp_path / "config.json").write_text(json.dumps(values))
    load(tmp_path, max_model_len=max_model_len, load_format="dummy")
    assert ("--max-model-len 32 gives these theirs" in caplog.text) == says


def test_eight_bits_are_refused(folder):
    with pytest.raises(
        UnsupportedModel, match="quantization int8 is not supported for models that run through transformers"
    ):
        load(folder, weights=WeightPolicy("stored", online="int8"))


def compute_among_others_otherwise(monkeypatch) -> None:
    """Tokens of ArceeForCausalLM meet their neighbours in the row outside of attention too."""

    def shifted(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x.roll(1, dims=1))))

    monkeypatch.setattr(transformers.models.arcee.modeling_arcee.ArceeMLP, "forward", shifted)


def test_a_model_that_computes_otherwise_among_others_is_refused(folder, monkeypatch):
    compute_among_others_otherwise(monkeypatch)
    with pytest.raises(UnsupportedModel, match="computes otherwise than alone"):
        load(folder)


@torch.inference_mode()
def test_a_step_may_want_no_logits_or_states_or_bring_embeddings(folder):
    """A long prompt's first chunk samples nothing."""
    model = load(folder)
    theirs = transformers.ArceeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    hidden = model.forward(Paged(model, 1, 16).next({0: IDS}))
    assert model.compute_logits(hidden, torch.tensor([], dtype=torch.int64)).shape == (0, SMALL["vocab_size"])
    expected = theirs.model(torch.tensor([IDS])).last_hidden_state[0]
    torch.testing.assert_close(model.final_hidden(hidden, torch.tensor([5, 1])), expected[[5, 1]], rtol=0, atol=1e-4)
    embeds = torch.randn(6, SMALL["hidden_size"], generator=torch.Generator().manual_seed(3))
    step = replace(Paged(model, 1, 16).next({0: [0] * 6}), input_embeds=embeds)
    got = model.compute_logits(model.forward(step))
    torch.testing.assert_close(got, theirs(inputs_embeds=embeds[None]).logits[0], rtol=0, atol=1e-4)


def test_no_code_of_a_repository_runs(folder):
    ran = folder / "ran"
    (folder / "modeling_arcee.py").write_text(f"open({str(ran)!r}, 'w')\nArceeForCausalLM = None\n")
    path = folder / "config.json"
    path.write_text(json.dumps(
        json.loads(path.read_text()) | {
            "auto_map": {"AutoModelForCausalLM": "modeling_arcee.ArceeForCausalLM"},
            "_attn_implementation": "kernels-community/flash-attn3", "attn_implementation": "someone/attention",
            "_experts_implementation_internal": "someone/experts",
        }
    ))  # fmt: skip
    assert logits(load(folder)).isfinite().all()
    assert not ran.exists()
