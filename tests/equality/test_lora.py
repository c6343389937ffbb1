"""Adapters on tiny models of many families: every token's logits are those of transformers' model with its adapter merged."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
import transformers

from runtime.config import WeightPolicy
from runtime.lora.peft_folder import read_adapter
from runtime.lora.targets import targets_of
from runtime.models import implementation
from runtime.models.adapters import AdapterRoom
from runtime.weights.fetch import resolve
from tests.equality.adapters import Deltas, linear_modules, merged, write_adapter
from tests.equality.test_families import FAMILIES, VOCAB, corrections
from tests.runtime.models.paged import Paged

ROOM = AdapterRoom(3, 8)
# Merged and fused projections, biases, Conv1D, windows, latent attention, parallel blocks, rows in another order, experts,
# recurrent layers of three kinds.
CHOSEN = (
    "llama, biases, tied", "qwen3", "gemma 2", "phi-3", "gpt-2", "pythia", "falcon, new", "cohere", "glm", "qwen 3 moe",
    "qwen 2 moe", "deepseek v3", "jamba", "granite 4, moe", "qwen 3 next", "lfm2", "mamba 2",
)  # fmt: skip


@dataclass
class Case:
    theirs: transformers.PreTrainedModel
    ours: object
    deltas: list[Deltas]
    modules: dict


@pytest.fixture(scope="module", params=CHOSEN)
def case(request, tmp_path_factory):
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    theirs = transformers.AutoModelForCausalLM.from_config(
        family.config(), dtype=torch.float32, attn_implementation=family.attention
    ).eval()
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, float(parameter.data[0]), 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, family.spread)
    for correction in corrections(theirs):
        torch.nn.init.normal_(correction, 0.0, 0.3)
    theirs.save_pretrained(folder)
    files = resolve(str(folder), None, lambda progress: None)
    spec = implementation.describe(files.config, "native")
    ours = implementation.load(
        spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None,
        max_model_len=spec.max_model_len, device="cpu", weights=WeightPolicy("float32"), adapters=ROOM,
    )  # fmt: skip
    targets = targets_of(spec)
    modules, deltas = linear_modules(theirs, targets), []
    for slot in range(ROOM.num_slots):
        rank = (4, 8, 3)[slot]
        deltas.append(write_adapter(folder / f"adapter{slot}", modules, slot, rank=rank))
        read = read_adapter(folder / f"adapter{slot}", targets, ROOM.max_rank)
        assert read.max_rank == rank
        ours.adapters.place(slot, ours.adapters.prepared(read.parts))
    return Case(theirs, ours, deltas, modules)


def test_every_linear_layer_of_all_tokens_is_a_target(case):
    """But for what is no matrix of ours: experts, the head, and what latent attention multiplies by head."""
    left_out = {
        name
        for name, each in case.theirs.named_modules()
        if isinstance(each, torch.nn.Linear) and name not in case.modules and "experts" not in name
    }
    assert {name.rpartition(".")[2] for name in left_out} <= {"lm_head", "embed_out", "kv_b_proj"}
    assert len(case.modules) >= 4


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
        for chunk in (range(0, 7), range(7, 8), range(8, 30)):
            spans = {row: prompt[chunk.start : chunk.stop] for row, prompt in enumerate(prompts)}
            spans = {row: span for row, span in spans.items() if span}
            for row, logits in step(paged, spans, slots).items():
                got[row].append(logits)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(torch.cat(ours), theirs, rtol=2e-4, atol=2e-4)


def step(paged: Paged, spans: dict[int, list[int]], slots: list[int]) -> dict[int, torch.Tensor]:
    by_token = torch.tensor([slots[row] for row, span in spans.items() for _ in span], dtype=torch.int32)
    given = replace(paged.next(spans), adapters=by_token)
    logits = paged.model.compute_logits(paged.model.forward(given))
    ends = accumulate(map(len, spans.values()))
    return {row: logits[end - len(span) : end] for (row, span), end in zip(spans.items(), ends, strict=True)}
