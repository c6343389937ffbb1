"""Draft heads from options to answers: what is planned and loaded, and what is refused by name."""

from __future__ import annotations

import json

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
from tests.equality.test_mtp import BEYOND_THE_LAST, EXPERTS
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


def options(**given) -> EngineConfig:
    config = SpeculativeConfig.of({"method": "mtp", "adaptive": False} | given)
    return EngineConfig(device="cpu", num_kv_blocks=64, max_num_seqs=4, speculative_config=config)


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
    with pytest.raises(
        UnsupportedModel, match="no MTP layers are known of LlamaForCausalLM; method mtp is for Deepseek"
    ):
        planned(llama)
    changed(mtp, num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedModel, match=r"the config tells of no MTP layers \(num_nextn_predict_layers\)"):
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
