"""From files to a decoder: formats that must agree, checkpoints that do not fit, memory that must not double."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ops
from runtime.config import WeightPolicy
from runtime.models.load import load_model
from runtime.models.spec.stages import stages
from runtime.weights.fetch import resolve
from runtime.weights.rules import WeightsError
from server.models.tokenizer import Tokenizer
from tests.runtime.models.paged import Paged
from tests.runtime.weights import smollm2

CONFIG = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
IDS = [5, 9, 60, 0, 33, 12]


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()


@pytest.fixture
def folder(original, tmp_path):
    original.save_pretrained(tmp_path)
    return tmp_path


def load(folder, **options):
    files = resolve(str(folder), None, lambda progress: None)
    defaults = {"dtype": "float32", "load_format": "auto", "seed": 0, "progress": lambda progress: None}
    return load_model(files, **defaults | options)


def logits(decoder) -> torch.Tensor:
    return Paged(decoder, 1, 16).step({0: IDS})[0]


def change(folder, **tensors):
    """Rewrite the weights: None drops a tensor."""
    path = folder / "model.safetensors"
    weights = {**load_file(path), **{name.replace("__", "."): value for name, value in tensors.items()}}
    save_file({name: value for name, value in weights.items() if value is not None}, path)


def set_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_shards_load_as_one_file_does(original, folder, tmp_path_factory):
    shards = tmp_path_factory.mktemp("shards")
    original.save_pretrained(shards, max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(shards)), logits(load(folder)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_load_into_float32_exactly(original, folder, dtype):
    rounded = {name: weight.to(dtype) for name, weight in original.state_dict().items()}
    save_file(rounded, folder / "model.safetensors")
    with torch.inference_mode():
        twin = transformers.LlamaForCausalLM(original.config).eval()
        twin.load_state_dict({name: weight.float() for name, weight in rounded.items()})
        torch.testing.assert_close(logits(load(folder)), twin(torch.tensor([IDS])).logits[0], rtol=0, atol=1e-4)


def test_progress_counts_every_stored_byte(original, folder):
    seen = []
    load(folder, progress=seen.append)
    stored = sum(weight.nbytes for weight in original.state_dict().values())
    assert {(p.phase, p.total, p.unit) for p in seen} == {("weights", stored, "B")}
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == stored


def test_tensors_that_do_not_fit_are_named(folder):
    change(
        folder,
        model__layers__0__self_attn__q_proj__weight=None,
        model__layers__1__mlp__up_proj__weight=torch.ones(47, 32),
        model__layers__2__mlp__up_proj__weight=torch.ones(48, 32),
        model__layers__1__self_attn__rotary_emb__inv_freq=torch.ones(4),  # old checkpoints have it; nobody needs it
    )
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert str(caught.value) == (
        "the weights do not fit the config; missing: model.layers.0.self_attn.q_proj.weight; "
        "wrong shape: model.layers.1.mlp.up_proj.weight is [47, 32] instead of [48, 32]; "
        "not part of this architecture: model.layers.2.mlp.up_proj.weight"
    )


def test_a_bias_that_the_config_does_not_announce_is_named(folder):
    change(folder, model__layers__0__self_attn__q_proj__bias=torch.ones(32))
    with pytest.raises(WeightsError, match=r"not part of this architecture: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)
    set_config(folder, attention_bias=True)
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.0\.self_attn\.k_proj\.bias"):
        load(folder)


def test_a_file_cut_short_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load(folder)


def test_a_tied_head_is_one_matrix_even_if_the_file_has_two(folder):
    untied = load(folder)
    set_config(folder, tie_word_embeddings=True)
    tied = load(folder)
    assert untied.weights_bytes - tied.weights_bytes >= 4 * 61 * 32
    assert untied.num_parameters - tied.num_parameters == 61 * 32
    change(folder, lm_head__weight=None)
    assert torch.equal(logits(load(folder)), logits(tied))
    set_config(folder, tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight"):
        load(folder)


def test_dummy_weights_need_no_files_but_the_config(folder):
    (folder / "model.safetensors").unlink()
    first, again = (logits(load(folder, load_format="dummy", seed=3)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.isfinite(first).all()
    assert not torch.equal(first, logits(load(folder, load_format="dummy", seed=4)))
    with pytest.raises(WeightsError, match=r"no \.safetensors files"):
        load(folder)


def test_unknown_dtypes_are_refused(folder):
    with pytest.raises(WeightsError, match="'int4' is not one of float32, bfloat16, float16"):
        load(folder, dtype="int4")


@pytest.mark.nightly  # of tiny models: tests/runtime/weights/test_gguf_checkpoint.py
def test_gguf_and_safetensors_of_the_same_weights_compute_the_same(tmp_path):
    theirs = smollm2.theirs()
    theirs.config.save_pretrained(tmp_path)
    set_config(tmp_path, architectures=["LlamaForCausalLM"], quantization_config=None)
    weights = {name: weight for name, weight in theirs.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(logits(load(tmp_path)), logits(load(smollm2.files().path)))


REFUSAL = ops.linear_refusal([ops.WeightFormat("Q4_1")], torch.float32, torch.device("cpu"))
NATIVE = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
STORED = WeightPolicy("stored", keep_quantized=True)


@NATIVE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_16_bit_weights_stay_so_and_compute_what_float32_computes(original, folder, dtype, tied):
    set_config(folder, tie_word_embeddings=tied)
    rounded = {name: weight.to(dtype) for name, weight in original.state_dict().items()}
    if tied:
        del rounded["lm_head.weight"]
    save_file(rounded, folder / "model.safetensors")
    narrow, wide = load(folder, weights=STORED), load(folder)
    assert torch.equal(logits(narrow), logits(wide))
    assert narrow.weights_bytes < 0.6 * wide.weights_bytes


@NATIVE
def test_a_dtype_for_weights_rounds_them_and_leaves_activations_float32(original, folder):
    save_file({name: weight.bfloat16() for name, weight in original.state_dict().items()}, folder / "model.safetensors")
    rounded = load(folder)
    save_file(original.state_dict(), folder / "model.safetensors")
    narrow = load(folder, weights=WeightPolicy("bfloat16"))
    assert narrow.dtype == "float32"
    # Norms are not matrices and keep their own type; theirs are ones here.
    assert torch.equal(logits(narrow), logits(rounded))


@NATIVE
@pytest.mark.parametrize(("online", "error", "size"), [("int8", 0.03, 0.5), ("int16", 0.0005, 0.8)])
def test_matrices_are_rounded_at_load(folder, online, error, size):
    exact, rounded = load(folder), load(folder, weights=WeightPolicy("stored", online=online))
    apart = logits(rounded) - logits(exact)
    assert 0 < apart.norm() < error * logits(exact).norm()
    assert rounded.weights_bytes < size * exact.weights_bytes


@NATIVE
@pytest.mark.parametrize("online", ["int8", "int16"])
def test_a_stage_embeds_by_the_rounded_rows_that_are_another_stages_head(original, folder, online):
    set_config(folder, tie_word_embeddings=True)
    change(folder, lm_head__weight=None)
    policy, ids = WeightPolicy("stored", online=online), torch.arange(CONFIG["vocab_size"])
    whole = load(folder, weights=policy)
    stage = load(folder, weights=policy, spec=stages(whole.spec, 2)[0])
    assert torch.equal(stage._vocabulary.embed(ids), whole._vocabulary.embed(ids))
    assert not torch.equal(stage._vocabulary.embed(ids), original.model.embed_tokens.weight)


@NATIVE
def test_a_quantised_model_stays_quantised_unless_asked():
    """The built-in model: Q4_1 matrices, a tied Q8_0 embedding, 90 MB of file."""
    wide, kept = (load_smollm2(WeightPolicy("float32", keep_quantized=keep)) for keep in (False, True))
    assert kept.weights_bytes < 96 << 20
    assert 400 << 20 < wide.weights_bytes < 520 << 20
    assert abs(loss(logits_of_text(kept)) - loss(logits_of_text(wide))) < 0.01


TEXT = """The tide comes in twice a day because the moon pulls at the sea, and a little because the sun does. When the three stand
in one line, the pull is strongest and the water rises furthest; a week later they stand at a right angle and the tide is at its
lowest. Sailors have known this for as long as there have been harbours. They wrote it down in tables, first by hand and then in
print, and a captain who could not read them did not keep his ship for long. Today a computer works out the same numbers from the
orbits, but the sea has not changed: a storm can still hold the water in a bay for hours after the table says that it should have
gone, and a clever pilot looks out of the window before he looks at the page."""


def load_smollm2(weights):
    files = smollm2.files()
    return load_model(
        files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, weights=weights
    )


def text_ids() -> list[int]:
    return Tokenizer.from_gguf(smollm2.files().gguf.metadata).encode(TEXT)


def logits_of_text(decoder) -> torch.Tensor:
    return Paged(decoder, 1, 512).step({0: text_ids()})[0]


def loss(logits: torch.Tensor) -> float:
    """Mean negative log-likelihood of each next token: the logarithm of perplexity."""
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text_ids()[1:])))
