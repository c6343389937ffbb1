"""A draft model from options to answers: what is planned and loaded, what is refused by name, and that nothing waits for it."""

from __future__ import annotations

import pytest
import torch
import transformers

from runtime.api import Request, SamplingParams
from runtime.batch import ON_DEVICE, Sample
from runtime.config import EngineConfig, PlanError
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.models.spec.model import UnsupportedModel
from runtime.policy.fairness import POLICIES
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.sequence import Sequence
from runtime.speculate.config import SpeculativeConfig
from runtime.speculate.methods import speculation_of
from runtime.speculate.scheduling import DraftScheduling
from runtime.start import plan_engine, start_engine
from runtime.weights.fetch import resolve

SIZES = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes the files of a random model of these sizes, or of these but for some."""

    def make(config_class: str = "LlamaConfig", **sizes):
        path = tmp_path_factory.mktemp("model")
        torch.manual_seed(len(sizes))
        config = getattr(transformers, config_class)(**SIZES | sizes)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
        return resolve(str(path), None, lambda progress: None)

    return make


def options(files, **more) -> EngineConfig:
    given = {"method": "draft_model", "model": str(files.path), "num_speculative_tokens": 3, "adaptive": False}
    return EngineConfig(
        device="cpu", num_kv_blocks=64, max_num_seqs=4, speculative_config=SpeculativeConfig.of(given), **more
    )


async def answer(engine, ids: list[int]) -> list[int]:
    found: list[int] = []
    async with engine.submit([Request("r", ids, SamplingParams(30, 0.0, ignore_eos=True))]) as stream:
        async for outputs in stream:
            for output in outputs:
                assert output.error is None
                found += output.token_ids
    return found


async def test_two_models_are_served_as_one_and_answer_as_one(folder):
    files, draft = folder(), folder(num_hidden_layers=1, hidden_size=16)
    plain = await start_engine(EngineConfig(device="cpu", num_kv_blocks=64), files, lambda progress: None)
    expected = await answer(plain, [3, 4, 5])
    engine = await start_engine(options(draft), files, lambda progress: None, draft)
    assert engine.model.num_parameters > plain.model.num_parameters
    assert engine.model.weights_bytes > plain.model.weights_bytes
    assert engine.model.speculative.startswith("draft_model ")
    assert await answer(engine, [3, 4, 5]) == expected
    checked = {metric.name: metric for metric in engine.metrics()}["spec_decode_num_draft_tokens"]
    assert sum(checked.samples.values()) > 0
    await plain.close()
    await engine.close()


def test_what_does_not_belong_together_is_named(folder):
    files = folder()

    def planned(draft, **more):
        return plan_engine(options(draft, **more), files, lambda progress: None, draft)

    with pytest.raises(UnsupportedModel, match="vocabulary has 91 tokens and the model's 90"):
        planned(folder(vocab_size=91))
    with pytest.raises(UnsupportedModel, match=r"the draft model \(MambaForCausalLM\) has recurrent layers"):
        planned(folder("MambaConfig", state_size=8))
    shorter = folder(max_position_embeddings=64)
    with pytest.raises(PlanError, match="--max-model-len 100 is more than the draft model's 64"):
        planned(shorter, max_model_len=100)
    assert planned(shorter).plan.max_model_len == 64
    with pytest.raises(PlanError, match="a draft model with files"):
        plan_engine(options(shorter), files, lambda progress: None)


def test_recurrent_layers_take_what_is_made_on_the_device(folder):
    recurrent = folder("MambaConfig", state_size=8)
    config = EngineConfig(
        device="cpu", num_kv_blocks=64, speculative_config=SpeculativeConfig.of({"method": "ngram_gpu"})
    )
    assert plan_engine(config, recurrent, lambda progress: None).plan.lookup == (2, 5, recurrent_length(recurrent))
    draft = folder()
    assert plan_engine(options(draft), recurrent, lambda progress: None, draft).plan.max_proposed == 3


def recurrent_length(files) -> int:
    return plan_engine(EngineConfig(device="cpu", num_kv_blocks=64), files, lambda progress: None).plan.max_model_len


def test_memory_is_planned_for_both(folder):
    files, draft = folder(), folder(num_hidden_layers=1)
    one = plan_engine(EngineConfig(device="cpu", kv_cache_bytes=1 << 20), files, lambda progress: None)
    config = options(draft)
    both = plan_engine(config, files, lambda progress: None, draft)
    assert both.spec.weights_bytes("float32") > one.spec.weights_bytes("float32")
    assert both.plan.layout.max_blocks(64, 64) * both.plan.layout.block_bytes == pytest.approx(
        1.5 * one.plan.layout.max_blocks(64, 64) * one.plan.layout.block_bytes
    )
    assert (both.plan.max_proposed, one.plan.max_proposed) == (3, 0)


def scheduler_of(num_blocks: int) -> Scheduler:
    speculation = speculation_of(
        SpeculativeConfig.of({"method": "draft_model", "model": "m", "num_speculative_tokens": 3, "adaptive": False}),
        0.1,
    )
    limits = SchedulerLimits(4, 64, frozenset())
    return Scheduler(
        limits, BlockPool(num_blocks), PrefixCache(BLOCK), POLICIES["fcfs"](), features=[DraftScheduling(speculation)]
    )


def sequence(number: int, prompt: list[int], max_tokens: int = 50, **params) -> Sequence:
    request = Request(str(number), prompt, SamplingParams(max_tokens, 0.0, **params))
    return Sequence(request, number=number, max_model_len=200, seed=0)


def test_steps_with_guesses_of_the_device_go_out_one_ahead():
    scheduler = scheduler_of(40)
    scheduler.add(one := sequence(1, [5, 6, 7]))
    first, second, third, fourth = (scheduler.schedule() for _ in range(4))
    assert [batch.rows[0].num_proposed for batch in (first, second, third, fourth)] == [0, 3, 3, 3]
    assert [batch.rows[0].draft_ids for batch in (first, second, third, fourth)] == [(), (), *[(ON_DEVICE,) * 3] * 2]
    assert third.rows[0].work == Sample(3)
    assert one.num_in_flight == 1 + 1 + 4 + 4
    for batch, tokens in ((first, [1]), (second, [2]), (third, [3, 4]), (fourth, [5, 6, 7, 8])):
        scheduler.settle(batch, [tokens])
    assert one.output_ids == [*range(1, 9)]
    assert one.num_computed_tokens == 3 + 7
    assert (one.num_draft_tokens, one.num_accepted_tokens) == (6, 4)


def test_guesses_cost_nobody_a_block_and_have_room_where_they_are_made():
    scheduler = scheduler_of(4)
    scheduler.add(one := sequence(1, [5, 6, 7], max_tokens=9))
    while (batch := scheduler.schedule()) is not None:
        (row,) = batch.rows
        assert row.end + row.num_proposed <= BLOCK * (4 - scheduler.blocks.pool.num_free)
        assert row.end + row.num_proposed <= 3 + 9
        scheduler.settle(batch, [[4]])
    assert one.output_ids == [4] * 9
    assert one.num_draft_tokens > 0


def test_rows_with_matchers_or_without_leave_have_none_of_the_device():
    scheduler = scheduler_of(40)
    scheduler.add(sequence(1, [5, 6], matchers=(lambda: None,)))
    request = Request("2", [7], SamplingParams(9, 0.0), speculative=False)
    scheduler.add(Sequence(request, number=2, max_model_len=200, seed=0))
    for _ in range(3):
        assert all(not row.num_proposed and not row.draft_ids for row in scheduler.schedule().rows)
