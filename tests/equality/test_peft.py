"""Adapters that the PEFT package itself wrote: every token's logits are those of PEFT's model, merged and not."""

from __future__ import annotations

import random

import pytest
import torch

from runtime.config import WeightPolicy
from runtime.lora.peft_folder import read_adapter
from runtime.lora.targets import targets_of
from runtime.models import implementation
from runtime.models.adapters import AdapterRoom
from runtime.weights.fetch import resolve
from tests.equality.adapters import embeddings, expert_parameters, is_tied, linear_modules
from tests.equality.test_families import FAMILIES, VOCAB, drawn
from tests.equality.test_lora import step
from tests.runtime.models.paged import Paged

peft = pytest.importorskip("peft")  # in the extra `test`

# Conv1D, merged projections, experts in parameters of both layouts, recurrent layers, attention beside them.
CHOSEN = (
    "llama, biases, tied", "gemma 2", "phi-3", "gpt-2", "qwen 3 moe", "gpt-oss", "jamba", "granite 4, moe", "qwen 3 next",
    "mamba 2",
)  # fmt: skip
BY_WEIGHT = {"jamba"}
KINDS = {
    "plain": {"r": 4, "lora_alpha": 12},
    "rslora, patterns": {
        "r": 3, "lora_alpha": 5, "use_rslora": True, "rank_pattern": {"o_proj": 6}, "alpha_pattern": {r"layers\.0\..*q_proj": 9},
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # PEFT's and transformers' own
@pytest.mark.parametrize(("name", "kind"), [*((name, "plain") for name in CHOSEN), (CHOSEN[0], "rslora, patterns")])
@torch.inference_mode()
def test_logits_are_those_of_pefts_own_model(name, kind, tmp_path):
    theirs = drawn(FAMILIES[name])
    theirs.save_pretrained(tmp_path)
    files = resolve(str(tmp_path), None, lambda progress: None)
    spec = implementation.describe(files.config, "native")
    ours = implementation.load(
        spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None,
        max_model_len=spec.max_model_len, device="cpu", weights=WeightPolicy("float32"), adapters=AdapterRoom(1, 8),
    )  # fmt: skip
    targets = targets_of(spec)
    # PEFT itself refuses the others. A head that is the embedding has an adapter of its own in a model that is not merged.
    modules = [each for each in linear_modules(theirs, targets) if name != "mamba 2" or not each.endswith("out_proj")]
    modules += [*embeddings(theirs, targets), *(["lm_head"] if is_tied(theirs) and name not in BY_WEIGHT else [])]
    experts = [f"{module}.{each}" for module, own in expert_parameters(theirs, targets).items() for each in own]
    torch.manual_seed(5)
    config = peft.LoraConfig(
        target_modules=modules, target_parameters=experts or None,
        fan_in_fan_out=name == "gpt-2", init_lora_weights=False, **KINDS[kind],
    )  # fmt: skip
    with torch.inference_mode(False):
        adapted = peft.get_peft_model(theirs, config).eval()
        adapted.save_pretrained(tmp_path / "adapter")
    read = read_adapter(tmp_path / "adapter", targets, 8)
    ours.adapters.keep(0, ours.adapters.prepared(read.parts))
    ours.adapters.place(0, 0)
    rng = random.Random(4)
    prompt = [rng.randrange(3, VOCAB) for _ in range(23)]
    got = step(Paged(ours, 2, 32), {0: prompt, 1: prompt}, [0, -1])
    ids = torch.tensor([prompt])
    unmerged = adapted(ids, use_cache=False).logits[0]
    with adapted.disable_adapter():
        without = adapted(ids, use_cache=False).logits[0]
    merged = unmerged
    if not is_tied(theirs):
        adapted.merge_adapter()
        merged = adapted(ids, use_cache=False).logits[0]
    assert not torch.allclose(unmerged, without, atol=0.01)
    # What a mixer of Mamba takes of a projection's weight itself PEFT's model knows merged alone.
    adapted_rows = ((0, merged),) if name in BY_WEIGHT else ((0, unmerged), (0, merged))
    for row, expected in (*adapted_rows, (1, without)):
        torch.testing.assert_close(got[row], expected, rtol=2e-4, atol=2e-4)
