"""Adapters on tiny models of many families: every token's logits are those of transformers' model with its adapter merged."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import transformers

import ops
from ops.lora import triton_lora
from ops.lora.triton_index import index
from ops.moe.triton_experts import TritonExpertWeights
from ops.native import supports as native_supports
from ops.registry import USUAL
from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig, WeightPolicy
from runtime.engine import Engine
from runtime.lora.peft_folder import read_adapter
from runtime.lora.targets import targets_of
from runtime.models import implementation
from runtime.models.adapters import AdapterRoom
from runtime.start import start_engine
from runtime.weights.fetch import resolve
from tests.equality.adapters import (
    Deltas,
    embeddings,
    expert_parameters,
    is_tied,
    linear_modules,
    merged,
    write_adapter,
    write_apart,
)
from tests.equality.greedy import TIE, Reference, engine_parts, preempt_often, references
from tests.equality.test_families import FAMILIES, VOCAB, drawn
from tests.runtime.models.paged import Paged
from tests.tiers import on_push

ROOM = AdapterRoom(3, 8)
MAX_TOKENS = 10
# Merged and fused projections, biases, Conv1D, windows, latent attention, parallel blocks, rows in another order, experts,
# recurrent layers of three kinds.
CHOSEN = (
    "llama, biases, tied", "qwen3", "gemma 2", "phi-3", "gpt-2", "pythia", "falcon, new", "cohere", "glm", "qwen 3 moe",
    "qwen 2 moe", "deepseek v3", "gpt-oss", "jamba", "granite 4, moe", "qwen 3 next", "lfm2", "mamba 2",
)  # fmt: skip


@dataclass
class Case:
    folder: Path
    theirs: transformers.PreTrainedModel
    ours: object
    deltas: list[Deltas]
    modules: dict
    experts: dict
    known: dict[tuple[int, tuple[int, ...]], Reference] = field(default_factory=dict)

    def expected(self, deltas: Deltas, prompt: list[int], draft: list[int]) -> Reference:
        """What transformers' model with that adapter says. `draft`: what it probably is."""
        key = (next((slot for slot, own in enumerate(self.deltas) if own is deltas), -1), tuple(prompt))
        if key not in self.known:
            with merged(self.theirs, deltas):
                (self.known[key],) = references(self.theirs, [prompt], MAX_TOKENS, [draft])
        return self.known[key]


@pytest.fixture(scope="module", params=CHOSEN)
def case(request, tmp_path_factory):
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("model")
    theirs = drawn(family)
    theirs.save_pretrained(folder)
    files = resolve(str(folder), None, lambda progress: None)
    spec = implementation.describe(files.config, "native")
    ours = implementation.load(
        spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None,
        max_model_len=spec.max_model_len, device="cpu", weights=WeightPolicy("float32"), adapters=ROOM,
    )  # fmt: skip
    targets = targets_of(spec)
    modules, deltas = linear_modules(theirs, targets), []
    if not is_tied(theirs):
        modules |= embeddings(theirs, targets)
    experts = {
        name: {each: true_shape(theirs.get_submodule(name), each) for each in parameters}
        for name, parameters in expert_parameters(theirs, targets).items()
    }
    assert bool(experts) == bool([*spec.experts()])
    for slot in range(ROOM.num_slots):
        rank = (4, 8, 3)[slot]
        deltas.append(write_adapter(folder / f"adapter{slot}", modules, slot, rank=rank, experts=experts))
        read = read_adapter(folder / f"adapter{slot}", targets, ROOM.max_rank)
        assert read.max_rank == rank
        ours.adapters.keep(slot, ours.adapters.prepared(read.parts))
        ours.adapters.place(slot, slot)
    return Case(folder, theirs, ours, deltas, modules, experts)


def true_shape(module: torch.nn.Module, parameter: str) -> torch.Tensor:
    """A parameter of experts as [experts, out, in]."""
    values = getattr(module, parameter)
    return values.mT if getattr(module, "is_transposed", False) else values


def test_every_linear_layer_of_all_tokens_is_a_target(case):
    """And embedding and head, unless they are one, which no merging could tell apart; but for what is no matrix of ours: what
    latent attention multiplies by head."""
    left_out = {
        name
        for name, each in case.theirs.named_modules()
        if isinstance(each, torch.nn.Linear) and name not in case.modules and "experts" not in name
    }
    tied = is_tied(case.theirs)
    assert {name.rpartition(".")[2] for name in left_out} <= {"kv_b_proj"} | ({"lm_head"} if tied else set())
    assert len(case.modules) >= 4
    assert tied != any(isinstance(each, torch.nn.Embedding) for each in case.modules.values())


@torch.inference_mode()
def test_each_row_has_its_own_adapter_s_logits(case):
    """Three adapters and none in one step, prompts in chunks."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (21, 1, 17, 30, 9)]
    slots = [1, -1, 0, 2, 1]
    expected = []
    for prompt, slot in zip(prompts, slots, strict=True):
        with merged(case.theirs, {} if slot < 0 else case.deltas[slot]):
            expected.append(case.theirs(torch.tensor([prompt]), use_cache=False).logits[0])
    plain = case.theirs(torch.tensor([prompts[0]]), use_cache=False).logits[0]
    assert not torch.allclose(expected[0], plain, atol=0.1)  # the adapter says something
    for traced in (False, True):
        paged = Paged(case.ours, len(prompts), 48)
        if traced:
            paged.model = case.ours.traced(paged.kv_caches)
        got = [[] for _ in prompts]
        for chunk in (range(7), range(7, 8), range(8, 30)):
            spans = {row: prompt[chunk.start : chunk.stop] for row, prompt in enumerate(prompts)}
            spans = {row: span for row, span in spans.items() if span}
            for row, logits in step(paged, spans, slots).items():
                got[row].append(logits)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(torch.cat(ours), theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("case", ["qwen3", "pythia"], indirect=True)
@torch.inference_mode()
def test_embeddings_by_themselves_have_each_token_s_adapter(case):
    """As who puts pictures among them asks for them."""
    case.ours.adapters.place(0, 0)
    ids, slots = torch.tensor([5, 9, 5, 11]), torch.tensor([0, -1, -1, 0], dtype=torch.int32)
    got, table = case.ours.embed(ids, slots), case.theirs.get_input_embeddings()
    plain = table(ids)
    with merged(case.theirs, case.deltas[0]):
        adapted = table(ids)
    torch.testing.assert_close(got, torch.where((slots < 0)[:, None], plain, adapted), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, adapted, atol=0.01)
    assert torch.equal(case.ours.embed(ids), plain)


@pytest.mark.skipif(native_supports(USUAL) is not None, reason=str(native_supports(USUAL)))
@pytest.mark.parametrize("case", ["qwen3", "phi-3"], indirect=True)
@torch.inference_mode()
def test_adapters_stand_beside_a_base_in_eight_bits(case):
    """What is rounded, base and adapter, is little beside what the adapter says, and no more than the base's own rounding."""
    files = resolve(str(case.folder), None, lambda progress: None)
    spec = implementation.describe(files.config, "native")
    ours = implementation.load(
        spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, device="cpu",
        max_model_len=spec.max_model_len, weights=WeightPolicy("float32", online="int8"), adapters=ROOM,
    )  # fmt: skip
    read = read_adapter(case.folder / "adapter0", targets_of(spec), ROOM.max_rank)
    ours.adapters.keep(0, ours.adapters.prepared(read.parts))
    ours.adapters.place(1, 0)
    rng = random.Random(6)
    prompt = [rng.randrange(3, VOCAB) for _ in range(24)]
    got = step(Paged(ours, 2, 32), {0: prompt, 1: prompt}, [1, -1])
    plain = case.theirs(torch.tensor([prompt]), use_cache=False).logits[0]
    with merged(case.theirs, case.deltas[0]):
        adapted = case.theirs(torch.tensor([prompt]), use_cache=False).logits[0]
    assert not torch.equal(got[1], plain)  # it is rounded
    error, base_error = (got[0] - adapted).norm() / adapted.norm(), (got[1] - plain).norm() / plain.norm()
    assert error < 2 * base_error
    assert (got[0] - adapted).norm() < 0.1 * (adapted - plain).norm()


@pytest.mark.parametrize("case", ["qwen 3 moe", "mixtral"], indirect=True)
@torch.inference_mode()
def test_every_expert_may_have_an_adapter_by_itself(case):
    """As modules, which checkpoints of transformers 4 have; beside one that changes none, and none."""
    targets, folder = targets_of(case.ours.spec), case.folder / "apart"
    deltas = write_apart(folder, case.theirs, targets, 7)
    case.ours.adapters.keep(7, case.ours.adapters.prepared(read_adapter(folder, targets, ROOM.max_rank).parts))
    case.ours.adapters.place(1, 7)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (12, 5, 9)]
    got = step(Paged(case.ours, 3, 16), dict(enumerate(prompts)), [1, -1, 1])
    case.ours.adapters.place(1, 1)
    for row, prompt in enumerate(prompts):
        with merged(case.theirs, {} if row == 1 else deltas):
            expected = case.theirs(torch.tensor([prompt]), use_cache=False).logits[0]
        torch.testing.assert_close(got[row], expected, rtol=2e-4, atol=2e-4)


def step(paged: Paged, spans: dict[int, list[int]], slots: list[int]) -> dict[int, torch.Tensor]:
    by_token = torch.tensor([slots[row] for row, span in spans.items() for _ in span], dtype=torch.int32)
    given = replace(paged.next(spans), adapters=by_token)
    logits = paged.model.compute_logits(paged.model.forward(given))
    ends = accumulate(map(len, spans.values()))
    return {row: logits[end - len(span) : end] for (row, span), end in zip(spans.items(), ends, strict=True)}


@pytest.mark.parametrize(
    ("case", "speculative"),
    [(name, speculative) for name in ("llama, biases, tied", "qwen 3 moe", "jamba") for speculative in (False, True)]
    + [(name, False) for name in ("gemma 2", "phi-3", "deepseek v3", "granite 4, moe", "falcon, new")],
    indirect=["case"],
)
async def test_the_engine_says_what_each_merged_model_would(case, speculative):
    """Three adapters and none over two slots: in chunks, with prefix hits, preemption and guesses; one adapter is loaded again
    under its name while its requests run, and all have to make room for others."""
    rng = random.Random(2)
    shared = [rng.randrange(3, VOCAB) for _ in range(36)]
    prompts = [shared, [*shared[:33], 5, 6, 5, 6, 5, 6], [7, 8, 9] * 7]
    options = {"speculative_method": "ngram", "num_speculative_tokens": 4} if speculative else {}
    config = EngineConfig(
        enable_lora=True, max_loras=2, max_cpu_loras=2, max_lora_rank=8, num_kv_blocks=64, max_model_len=96,
        max_num_batched_tokens=16, max_num_seqs=5, **options,
    )  # fmt: skip
    parts = await engine_parts(case.ours, config)
    preempt_often(parts.scheduler)
    engine = Engine(parts.scheduler, parts.runner, parts.model, adapters=parts.adapters)
    adapters = engine.adapters
    assert adapters is not None
    try:
        names = [None, "first", "second", "third"]
        for number, name in enumerate(names[1:]):
            await adapters.load(name, str(case.folder / f"adapter{number}"))
        deltas = dict(zip(names, [{}, *case.deltas], strict=True))
        for round_number in range(2):
            asked = [(name, prompt) for prompt in prompts for name in names]
            streams = [asyncio.create_task(answer(engine, name, prompt)) for name, prompt in asked]
            await asyncio.sleep(0)  # all are submitted
            if round_number:
                await adapters.load("first", str(case.folder / "adapter2"))
            answers = await asyncio.gather(*streams)
            for (name, prompt), (ids, _) in zip(asked, answers, strict=True):
                assert_same(ids, case.expected(deltas[name], prompt, ids), f"round {round_number}, {name}")
        # What has the name now is another adapter, and finds no block of the one before.
        ids, num_cached = await answer(engine, "first", shared)
        assert num_cached == 0
        assert_same(ids, case.expected(deltas["third"], shared, ids), "loaded again")
        (_, num_cached) = await answer(engine, "first", shared)
        assert (num_cached > 0) == parts.scheduler.blocks.cache.enabled
        slots = adapters.slots
        assert slots.num_evictions > 0
        assert slots.num_slot_evictions > 0
        assert parts.scheduler.sequences.num_preemptions > 0
    finally:
        await engine.close()
    assert parts.scheduler.blocks.pool.num_free == parts.scheduler.blocks.pool.num_blocks


async def answer(engine: Engine, name: str | None, prompt: list[int]) -> tuple[list[int], int]:
    adapter = None if name is None else engine.adapters.find(name)
    request = Request(str(name), list(prompt), SamplingParams(MAX_TOKENS, temperature=0.0), adapter=adapter)
    ids: list[int] = []
    num_cached = 0
    async with engine.submit([request]) as stream:
        async for outputs in stream:
            for output in outputs:
                assert output.error is None
                ids += output.token_ids
                num_cached = output.num_cached_tokens
    return ids, num_cached


def assert_same(ids: list[int], reference: Reference, what: str) -> None:
    for position, (ours, theirs) in enumerate(zip(ids, reference.token_ids, strict=True)):
        if ours != theirs:
            assert reference.margins[position] < TIE, f"{what}, output {position}: {ours} instead of {theirs}"
            return


@pytest.mark.parametrize("case", ["llama, biases, tied"], indirect=True)
async def test_an_engine_that_slept_says_what_each_merged_model_would(case, tmp_path):
    """Of adapters that were there before, and that came while it slept; one whose files have changed meanwhile is refused."""
    changing = tmp_path / "changing"
    write_adapter(changing, case.modules, 5)
    files = resolve(str(case.folder), None, lambda progress: None)
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "num_kv_blocks": 64, "max_model_len": 96}
    engine = await start_engine(EngineConfig(dtype="float32", **options), files, lambda progress: None)
    assert engine.adapters is not None
    try:
        await engine.adapters.load("first", str(case.folder / "adapter0"))
        await engine.adapters.load("changing", str(changing))
        await answer(engine, "first", [5, 6, 7])
        await engine.sleep()
        write_adapter(changing, case.modules, 6, rank=8)
        await engine.adapters.load("second", str(case.folder / "adapter1"))
        for name, deltas in (("first", case.deltas[0]), ("second", case.deltas[1]), (None, {})):
            ids, _ = await answer(engine, name, [5, 6, 7])
            assert_same(ids, case.expected(deltas, [5, 6, 7], ids), str(name))
        request = Request("r", [5], SamplingParams(2), adapter=engine.adapters.find("changing"))
        async with engine.submit([request]) as stream:
            (refused,) = [output async for outputs in stream for output in outputs]
        assert "could not be read again" in (refused.error or "")
    finally:
        await engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["llama, biases, tied", "phi-3", "qwen 3 moe", "gpt-oss"], indirect=True)
async def test_captured_steps_on_cuda_say_what_each_merged_model_would(case, tmp_path):
    """Adapters come and go in slots that graphs were captured with, those of experts, embedding and head, too."""
    files = resolve(str(case.folder), None, lambda progress: None)
    spec = implementation.describe(files.config, "native")
    ours = implementation.load(
        spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None,
        max_model_len=spec.max_model_len, device="cuda", weights=WeightPolicy("float32"),
        adapters=AdapterRoom(2, 8, experts=True, vocabulary=True),
    )  # fmt: skip
    config = EngineConfig(
        device="cuda", dtype="float32", enable_lora=True, max_loras=2, max_cpu_loras=3, max_lora_rank=8, num_kv_blocks=64,
        max_model_len=96, max_num_batched_tokens=32, max_num_seqs=8,
    )  # fmt: skip
    parts = await engine_parts(ours, config)
    engine = Engine(parts.scheduler, parts.runner, parts.model, adapters=parts.adapters)
    assert engine.adapters is not None
    try:
        names, written = [None, "first", "second", "third"], []
        for number, name in enumerate(names[1:]):
            written.append(write_adapter(tmp_path / name, case.modules, number, experts=case.experts))
            await engine.adapters.load(name, str(tmp_path / name))
        prompts = [[7, 8, 9] * 7, [5, 6] * 18, [11]]
        asked = [(number, prompt) for prompt in prompts for number in range(len(names))]
        answers = await asyncio.gather(*(answer(engine, names[number], prompt) for number, prompt in asked))
        for (number, prompt), (ids, _) in zip(asked, answers, strict=True):
            deltas = written[number - 1] if number else {}
            with merged(case.theirs, deltas):
                (expected,) = references(case.theirs, [prompt], MAX_TOKENS, [ids])
            assert_same(ids, expected, str(names[number]))
        assert engine.adapters.slots.num_slot_evictions > 0
    finally:
        await engine.close()


@pytest.mark.parametrize("case", on_push(["llama, biases, tied", "qwen 3 moe"], "llama, biases, tied"), indirect=True)
@torch.inference_mode()
def test_kernels_of_a_device_serve_the_same_model(case, monkeypatch):
    """By Triton's interpreter: what sorts tokens by slot, what shrinks and what expands, in all layers and experts, and at both
    ends."""
    for module in (ops, ops.lora):
        monkeypatch.setattr(module, "prepare_lora", triton_lora.prepare)
    monkeypatch.setattr(
        ops, "prepare_experts", lambda shape, dtype, device, _: TritonExpertWeights(shape, dtype, device)
    )
    monkeypatch.setattr(ops, "index_adapters", index)
    files = resolve(str(case.folder), None, lambda progress: None)
    spec = implementation.describe(files.config, "native")
    ours = implementation.load(
        spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None,
        max_model_len=spec.max_model_len, device="cpu", weights=WeightPolicy("float32"), adapters=ROOM,
    )  # fmt: skip
    for slot in range(ROOM.num_slots):
        read = read_adapter(case.folder / f"adapter{slot}", targets_of(spec), ROOM.max_rank)
        for model in (ours, case.ours):  # whose slots an engine may have written
            model.adapters.keep(slot, model.adapters.prepared(read.parts))
            model.adapters.place(slot, slot)
    spans, slots = {0: [5, 6, 7, 8, 9], 1: [11], 2: [21] * 18, 3: [9, 8]}, [1, -1, 0, 2]
    got = step(Paged(ours, 4, 32), spans, slots)
    expected = step(Paged(case.ours, 4, 32), spans, slots)
    for row in spans:
        torch.testing.assert_close(got[row], expected[row], rtol=2e-4, atol=2e-4)
