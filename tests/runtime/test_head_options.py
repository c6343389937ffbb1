"""Draft heads from options to answers: what is planned and loaded, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from runtime.config import EngineConfig
from runtime.models.spec.draft_head import DraftHeadSpec
from runtime.models.spec.model import UnsupportedModel
from runtime.speculate.config import SpeculativeConfig
from runtime.start import plan_engine, start_engine
from runtime.weights.fetch import ModelFiles, resolve
from runtime.weights.rules import WeightsError
from tests.equality.draft_heads import mtp_checkpoint
from tests.equality.test_draft_heads import BEYOND_THE_LAST, EXPERTS, Eagle
from tests.runtime.test_draft_model import SIZES, answer

VALUES = EXPERTS | {"first_k_dense_replace": 1, "head_dim": 24}


def files_of(folder) -> ModelFiles:
    return resolve(str(folder), None, lambda progress: None)


@pytest.fixture
def mtp(tmp_path):
    torch.manual_seed(3)
    of = transformers.Glm4MoeConfig
    alone = VALUES | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    mtp_checkpoint(tmp_path, of(**VALUES), of(**alone), BEYOND_THE_LAST, {"num_nextn_predict_layers": 1})
    return tmp_path


@pytest.fixture
def eagle(tmp_path):
    """A folder with a model, and in it one of a draft head, by method."""

    def make(method: str = "eagle3", **more):
        torch.manual_seed(4)
        Eagle(method, more, {"bias": False} if method == "eagle" else {"layers": (2, 3, 5), "num_ids": 100}).made(
            tmp_path
        )
        return tmp_path

    return make


def options(**given) -> EngineConfig:
    config = SpeculativeConfig.of({"method": "mtp", "adaptive": False} | given)
    return EngineConfig(device="cpu", num_kv_blocks=200, max_num_seqs=4, speculative_config=config)


def planned(folder, config: EngineConfig | None = None):
    return plan_engine(config or options(), files_of(folder), lambda progress: None)


def changed(folder, **told) -> None:
    """Its config.json says this, too; what is None it says no longer."""
    file = folder / "config.json"
    values = {key: value for key, value in (json.loads(file.read_text()) | told).items() if value is not None}
    file.write_text(json.dumps(values))


async def test_layers_of_the_models_own_checkpoint_guess_for_it(mtp):
    files = files_of(mtp)
    plain = await start_engine(EngineConfig(device="cpu", num_kv_blocks=64), files, lambda progress: None)
    expected = await answer(plain, [3, 4, 5])
    engine = await start_engine(options(), files, lambda progress: None)
    assert engine.model.num_parameters > plain.model.num_parameters
    assert engine.model.speculative == "mtp, 3 drafts of a sequence in a step"
    assert await answer(engine, [3, 4, 5]) == expected
    metrics = {metric.name: metric for metric in engine.metrics()}
    assert sum(metrics["spec_decode_num_draft_tokens"].samples.values()) > 0
    await plain.close()
    await engine.close()


def test_it_is_planned_with_the_model(mtp):
    alone = plan_engine(EngineConfig(device="cpu"), files_of(mtp), lambda progress: None)
    both = planned(mtp)
    assert isinstance(both.spec.draft, DraftHeadSpec)
    assert len(both.spec.memory_kinds()) == len(alone.spec.memory_kinds()) + 1
    assert both.plan.max_proposed == 3
    shared = 4 * 2 * VALUES["vocab_size"] * VALUES["hidden_size"]  # embedding and head are the model's
    assert 0 < both.spec.draft.weights_bytes("float32") < alone.spec.weights_bytes("float32") - shared


async def test_a_model_without_such_layers_is_named(mtp, tmp_path_factory):
    llama = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(llama)
    with pytest.raises(UnsupportedModel, match="method mtp does not support LlamaForCausalLM; it supports Deepseek"):
        planned(llama)
    changed(mtp, num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedModel, match=r"the config has no MTP layers \(num_nextn_predict_layers\)"):
        planned(mtp)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda tensors: [tensors.pop(name) for name in [*tensors] if ".layers.2." in name], "the checkpoint has no MTP layers"),
        (lambda tensors: tensors.pop("model.layers.2.eh_proj.weight"), "missing: model.layers.2.eh_proj.weight"),
        (
            lambda tensors: tensors.update({"model.layers.2.enorm.weight": torch.ones(63)}),
            r"model.layers.2.enorm.weight is \[63\] instead of \[64\]",
        ),
        (
            lambda tensors: tensors.update({"model.layers.2.more.weight": torch.ones(3)}),
            "not part of this architecture: model.layers.2.more.weight",
        ),
    ],
)  # fmt: skip
async def test_a_checkpoint_whose_layers_do_not_fit_is_named(mtp, spoil, complaint):
    tensors = load_file(mtp / "model.safetensors")
    spoil(tensors)
    save_file(tensors, mtp / "model.safetensors")
    with pytest.raises(WeightsError, match=complaint):
        await start_engine(options(), files_of(mtp), lambda progress: None)


def with_head(folder, method: str) -> EngineConfig:
    return options(method=method, model=str(folder / "head"))


async def started(folder, method: str):
    head = files_of(folder / "head")
    return await start_engine(with_head(folder, method), files_of(folder), lambda progress: None, head)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
async def test_heads_of_a_checkpoint_of_their_own_guess(eagle, method):
    folder = eagle(method)
    plain = await start_engine(EngineConfig(device="cpu", num_kv_blocks=200), files_of(folder), lambda progress: None)
    expected = await answer(plain, [3, 4, 5])
    engine = await started(folder, method)
    assert engine.model.speculative.startswith(f"{method} {folder}")
    assert await answer(engine, [3, 4, 5]) == expected
    metrics = {metric.name: metric for metric in engine.metrics()}
    assert sum(metrics["spec_decode_num_draft_tokens"].samples.values()) > 0
    await plain.close()
    await engine.close()


@pytest.mark.parametrize(
    ("method", "told", "complaint"),
    [
        ("eagle3", {"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported by method eagle3"),
        ("eagle3", {"model_type": "qwen2"}, "layers are of model_type 'qwen2'; supported: llama"),
        ("eagle3", {"vocab_size": 90}, "vocabulary has 90 tokens and the model's 211"),
        ("eagle3", {"target_hidden_size": 63}, "for hidden states of 63 dims, and the model's have 64"),
        ("eagle3", {"draft_vocab_size": 300}, r"guesses 300 tokens \(draft_vocab_size\) of the model's 211"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, r"inputs of layers \[2, 3, 7\] .*, and the model has 6"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [3, 2]}, r"layers \[3, 2\], which are not in ascending order"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "does not use hidden states of inner layers"),
        ("eagle3", {"norm_before_fc": True}, "norm_before_fc"),
        ("eagle", {"hidden_size": 32}, "hidden_size is 32 and the model's 64"),
        ("eagle", {"draft_vocab_size": 40}, "use method eagle3"),
    ],
)  # fmt: skip
def test_a_head_that_is_not_for_the_model_is_named(eagle, method, told, complaint):
    folder = eagle(method)
    changed(folder / "head", **told)
    with pytest.raises(UnsupportedModel, match=complaint):
        plan_engine(with_head(folder, method), files_of(folder), lambda progress: None, files_of(folder / "head"))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "missing: fc.weight"),
        (lambda tensors: tensors.update({"d2t": torch.full((100,), 3)}), None),
        (lambda tensors: tensors["d2t"].fill_(150), "d2t does not name 100 different ones of the model's 211 tokens"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.ones(90, 64)}), r"lm_head.weight is \[90, 64\] instead of"),
    ],
)  # fmt: skip
async def test_a_checkpoint_of_another_shape_is_named(eagle, spoil, complaint):
    folder = eagle()
    tensors = load_file(folder / "head" / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "head" / "model.safetensors")
    if complaint is None:
        await (await started(folder, "eagle3")).close()
    else:
        with pytest.raises(WeightsError, match=complaint):
            await started(folder, "eagle3")


def test_models_of_transformers_have_no_heads(mtp):
    changed(mtp, architectures=["Glm4MoeForCausalLM"])
    config = replace(options(), model_impl="transformers")
    with pytest.raises(UnsupportedModel, match="runs through transformers, which does not support method mtp"):
        planned(mtp, config)
