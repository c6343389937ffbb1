"""Draft models and heads beside a model that is shared out over ranks or cut into stages: no guess changes a token, whatever
happens to prompts, and where a draft says what the model does its guesses are right, wherever they were made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from runtime.config import EngineConfig
from runtime.models.spec.model import UnsupportedModel
from runtime.speculate.config import SpeculativeConfig
from runtime.start import SharedDevice, plan_engine
from runtime.start.build import EngineParts
from runtime.start.ranks import build_parts
from runtime.weights.fetch import ModelFiles, resolve
from tests.equality import test_draft_heads
from tests.equality.greedy import Outcome, run
from tests.equality.test_draft_heads import CASES, Mtp
from tests.equality.test_draft_model import LLAMA, SMALLER
from tests.equality.test_drafts import NUM_TOKENS, PROMPTS
from tests.tiers import on_push

WAYS = [(2, 1), (1, 2), (2, 2)]  # ranks, stages
EVEN = {"vocab_size": 212}  # of which two ranks have as many


def quiet(progress) -> None:
    pass


def generated(files: ModelFiles, draft: ModelFiles | None, speculation, ways=(1, 1), **how) -> Outcome:
    """How many tokens and guesses there were, on so many ranks of so many stages."""

    async def parts(model: None, config: EngineConfig) -> EngineParts:
        return await build_parts(config, files, quiet, draft, SharedDevice())

    ranks, stages = ways
    config = EngineConfig(
        device="cpu", dtype="float32", num_kv_blocks=160, max_num_seqs=4, max_model_len=200, max_num_batched_tokens=40,
        tensor_parallel_size=ranks, pipeline_parallel_size=stages, speculative_config=speculation,
    )  # fmt: skip
    return run(None, config, PROMPTS, NUM_TOKENS, together=True, planned=True, parts_of=parts, **how)


def drawn(folder: Path, number: int, values: dict) -> ModelFiles:
    torch.manual_seed(number)
    config = transformers.LlamaConfig(**values)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return resolve(str(folder), None, quiet)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[ModelFiles, ModelFiles, Outcome]:
    """A model, a smaller one, and what the first answers."""
    files, smaller = (
        drawn(tmp_path_factory.mktemp("model"), number, values | EVEN) for number, values in enumerate((LLAMA, SMALLER))
    )
    return files, smaller, generated(files, None, None)


def by_draft_model(files: ModelFiles) -> SpeculativeConfig:
    return SpeculativeConfig.of(
        {"method": "draft_model", "model": str(files.path), "num_speculative_tokens": 4, "adaptive": False}
    )


@pytest.mark.parametrize(("ranks", "stages"), on_push(WAYS, (2, 1)))
def test_guesses_of_another_model_change_no_token(models, ranks, stages):
    files, smaller, plain = models
    cut = generated(files, smaller, by_draft_model(smaller), (ranks, stages), preempting=True)
    again = generated(files, smaller, by_draft_model(smaller), (ranks, stages), rounds=2)
    assert cut.token_ids == again.token_ids == plain.token_ids
    assert cut.num_draft_tokens > 40
    assert cut.num_preemptions > 3
    assert again.num_cached_tokens > 0


@pytest.mark.parametrize(("ranks", "stages"), on_push(WAYS, (1, 2)))
def test_all_guesses_of_the_model_itself_are_right(models, ranks, stages):
    files, _, plain = models
    guessed = generated(files, files, by_draft_model(files), (ranks, stages))
    assert guessed.token_ids == plain.token_ids
    assert guessed.num_draft_tokens == guessed.num_accepted_tokens > 100


@pytest.fixture(autouse=True)
def even_heads(monkeypatch):
    monkeypatch.setattr(test_draft_heads, "SMALL", test_draft_heads.SMALL | EVEN)


def headed(name: str, folder: Path) -> tuple[ModelFiles, ModelFiles | None, SpeculativeConfig]:
    case = CASES[name]
    if isinstance(case, Mtp):
        case = replace(case, values=case.values | EVEN)
    torch.manual_seed(5)
    case.made(folder)
    given = {"num_speculative_tokens": 3, "adaptive": False, "method": case.method}
    draft = None if case.method == "mtp" else resolve(str(folder / "head"), None, quiet)
    if draft is not None:
        given["model"] = str(draft.path)
    return resolve(str(folder), None, quiet), draft, SpeculativeConfig.of(given)


@pytest.mark.parametrize(
    ("name", "ways"), on_push([("mimo", (2, 2)), ("eagle", (2, 1)), ("eagle", (1, 2))], ("mimo", (2, 2)))
)
def test_guesses_of_heads_change_no_token(name, ways, tmp_path):
    files, draft, speculation = headed(name, tmp_path)
    plain = generated(files, None, None)
    guessed = generated(files, draft, speculation, ways, rounds=2)
    assert guessed.token_ids == plain.token_ids
    assert guessed.num_draft_tokens > 40


def test_a_head_that_reads_layers_of_several_stages_is_refused_by_name(tmp_path):
    files, draft, speculation = headed("eagle 3", tmp_path)
    config = EngineConfig(
        device="cpu", dtype="float32", num_kv_blocks=160, pipeline_parallel_size=2, speculative_config=speculation
    )
    with pytest.raises(UnsupportedModel, match="its draft head reads layers"):
        plan_engine(config, files, quiet, draft)
    plan_engine(replace(config, pipeline_parallel_size=1, tensor_parallel_size=2), files, quiet, draft)
