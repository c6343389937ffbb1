"""What experts have to do, as metrics: every computed token counts once for each expert it takes, on however many devices."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
import torch
import transformers

from ops.moe import reference
from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig, PlanError
from runtime.models.blocks.mlp import MoEBlock
from runtime.models.expert_load import ExpertLoad
from runtime.start import plan_engine, start_engine
from runtime.weights.fetch import resolve

PROMPTS, NUM_ANSWER = ([5, 6, 7, 8, 9], [11, 12, 13]), 6
NUM_COMPUTED = sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_ANSWER - 1)  # the last token of an answer is never read
NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 4, 2
COUNTED = {"enable_expert_distribution_metrics": True}


def quiet(progress) -> None:
    pass


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixture")
    config = transformers.MixtralConfig(
        vocab_size=60, hidden_size=32, intermediate_size=16, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K, max_position_embeddings=64,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    return resolve(str(folder), None, quiet)


def options(**more) -> EngineConfig:
    return EngineConfig(device="cpu", num_kv_blocks=32, enable_prefix_caching=False, **more)


async def answered(engine) -> dict[str, dict]:
    """Metrics of experts behind two answers, by name."""
    params = SamplingParams(NUM_ANSWER, temperature=0.0, ignore_eos=True)
    requests = [Request(str(number), ids, params) for number, ids in enumerate(PROMPTS)]
    async with engine.submit(requests) as stream:
        async for _ in stream:
            pass
    return {each.name: each.samples for each in engine.metrics() if each.name.startswith("expert_")}


async def test_every_computed_token_counts_for_each_expert_that_it_takes(files, monkeypatch):
    taken, layers, forward = Counter(), count(), MoEBlock.forward
    engine = await start_engine(options(**COUNTED), files, quiet)

    def noting(self, x, step):
        chosen, _ = reference.route(self._router.matmul(x), self._routing, self._correction_bias)
        layer = next(layers) % NUM_LAYERS
        taken.update((layer, expert) for expert in chosen.flatten().tolist())
        return forward(self, x, step)

    monkeypatch.setattr(MoEBlock, "forward", noting)
    try:
        found = await answered(engine)
    finally:
        await engine.close()
    by_layer = [[taken[layer, expert] for expert in range(NUM_EXPERTS)] for layer in range(NUM_LAYERS)]
    assert [sum(each) for each in by_layer] == [NUM_COMPUTED * TOP_K] * NUM_LAYERS
    assert found["expert_tokens"] == {(("device", "0"),): NUM_COMPUTED * TOP_K * NUM_LAYERS}
    assert found["expert_load_max_over_mean"] == {
        (("layer", str(layer)),): max(each) * NUM_EXPERTS / sum(each) for layer, each in enumerate(by_layer)
    }
    assert [*found["expert_load_unused"].values()] == [each.count(0) for each in by_layer]


@pytest.mark.parametrize(
    "more",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"pipeline_parallel_size": 2},
    ],
)
async def test_on_several_devices_the_counts_are_those_of_one(files, more):
    told = []
    for each in ({}, more):
        engine = await start_engine(options(**COUNTED, **each), files, quiet)
        try:
            told.append(await answered(engine))
        finally:
            await engine.close()
    alone, several = told
    assert several["expert_load_max_over_mean"] == alone["expert_load_max_over_mean"]
    devices = several["expert_tokens"]
    assert len(devices) == (2 if more.get("enable_expert_parallel") else 1)
    assert sum(devices.values()) == sum(alone["expert_tokens"].values())


async def test_nothing_is_counted_unless_it_is_asked_for_nor_where_there_are_no_experts(files, tmp_path):
    engine = await start_engine(options(), files, quiet)
    try:
        assert await answered(engine) == {}
    finally:
        await engine.close()
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="LlamaForCausalLM has no experts that are counted"):
        plan_engine(options(**COUNTED), resolve(str(tmp_path), None, quiet), quiet)


def test_a_model_that_has_slept_counts_on():
    def load(numbers: list[int]) -> tuple[ExpertLoad, torch.Tensor]:
        table = torch.tensor([9, 9])
        made = ExpertLoad([{"model.layers.3.mlp.experts": table}], num_devices=2)
        table += torch.tensor(numbers)
        return made, table

    first, table = load([1, 2])
    assert first.by_layer() == {"3": [1, 2]}
    table += 1
    second, later = load([0, 0])
    first.awake(second)
    later += torch.tensor([5, 0])
    assert first.by_layer() == {"3": [7, 3]}
    third, _ = load([1, 1])
    first.awake(third)
    assert first.by_layer() == {"3": [8, 4]}
    assert [[*each.samples.values()] for each in first.metrics()] == [[8.0, 4.0], [8 * 2 / 12], [0.0]]
