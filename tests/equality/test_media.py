"""Every family that sees or hears, as a tiny random model written by transformers' own classes: greedy decoding token for token
equal to transformers, with one picture, several of mixed sizes, at the start, in the middle and at the end, however the engine cuts
the work."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from runtime.api import FinishReason, Request, SamplingParams
from runtime.config import EngineConfig
from runtime.models import implementation
from runtime.weights.fetch import resolve
from tests.equality.greedy import Reference, compare, engine_parts
from tests.equality.media import Joined, Medium, Prompt, make_engine, run, side_by_side, transformers_greedy

VOCAB, MAX_TOKENS, IMAGE = 128, 8, 100
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CLIP = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
}  # fmt: skip
Drawn = Callable[[np.random.Generator, int], Medium]


@dataclass(frozen=True)
class Row:
    """A family. `config`: of the whole model; `draw`: a picture, of one of two sizes if it knows several. `whole_items`: which are
    never cut."""

    config: Callable[[], transformers.PretrainedConfig]
    draw: Drawn
    joined: Joined = side_by_side
    whole_items: bool = False


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def square(num_tokens: int, size: int = 32, **more: np.ndarray) -> Drawn:
    """A picture of one size, which makes `num_tokens`."""
    return lambda rng, _: Medium({"pixel_values": floats(rng, 1, 3, size, size), **more}, (IMAGE,) * num_tokens, IMAGE)


def llava(text: dict, **rest) -> Callable[[], transformers.PretrainedConfig]:
    return lambda: transformers.LlavaConfig(
        text_config=TEXT | text, vision_config={"model_type": "clip_vision_model", "projection_dim": 16} | CLIP,
        image_token_index=IMAGE, **rest,
    )  # fmt: skip


FAMILIES = {
    "llava 1.5": Row(llava({"model_type": "llama"}), square(16)),
    "llava, mistral, all patches": Row(
        llava({"model_type": "mistral"}, vision_feature_select_strategy="full", vision_feature_layer=-1), square(17)
    ),
}


@dataclass(frozen=True)
class Case:
    folder: Path
    theirs: transformers.PreTrainedModel
    ours: object
    family: Row
    pictures: list[Medium]

    def text(self, length: int, seed: int = 0) -> list[int]:
        rng = random.Random(f"{length} {seed}")
        return [rng.randrange(3, IMAGE) for _ in range(length)]

    def reference(self, prompt: Prompt) -> Reference:
        return transformers_greedy(self.theirs, prompt, MAX_TOKENS, self.family.joined)


def drawn(family: Row) -> transformers.PreTrainedModel:
    """A model of the family, always the same: numbers are random, but not by chance."""
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(
        family.config(), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and norms begin as zeros and ones, which hides mistakes
            torch.nn.init.normal_(parameter, float(parameter.data[0]), 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model


def load(folder: Path):
    files = resolve(str(folder), None, lambda progress: None)
    return implementation.load(
        implementation.describe(files.config, "native"), files, dtype="float32", load_format="auto", seed=0,
        progress=lambda progress: None, max_model_len=256, device="cpu", weights=None,
    )  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("model")
    theirs = drawn(family)
    theirs.save_pretrained(folder)
    rng = np.random.default_rng(2)
    return Case(folder, theirs, load(folder), family, [family.draw(rng, index % 2) for index in range(3)])


@pytest.fixture(scope="module")
def told(case) -> list[tuple[Prompt, Reference]]:
    a, b, c = case.pictures
    prompts = [
        Prompt.of(case.text(9)),
        Prompt.of(a, case.text(5)),
        Prompt.of(case.text(7), a, case.text(6), b),
        Prompt.of(case.text(3), b, a, case.text(20), c, case.text(2)),
        Prompt.of(case.text(7), b, case.text(6), a),  # the same text, and other pictures
    ]
    return [(prompt, case.reference(prompt)) for prompt in prompts]


def config(**options) -> EngineConfig:
    return EngineConfig(num_kv_blocks=64, max_model_len=256, **options)


def same(case: Case, told: list[tuple[Prompt, Reference]], options: EngineConfig, **how):
    seen = run(case.ours, options, [prompt for prompt, _ in told], MAX_TOKENS, **how)
    assert compare(seen.outcome, [reference for _, reference in told]) <= 1
    return seen


def test_pictures_matter(case, told):
    """Else the others would show nothing."""
    (_, _), (_, _), (_, one), _, (_, other) = told
    assert one.token_ids != other.token_ids


def test_alone(case, told):
    seen = same(case, told, config(enable_prefix_caching=False), together=False)
    assert (seen.num_encoded, seen.num_kept) == (3, 5)  # of eight pictures three are different


def test_together(case, told):
    assert same(case, told, config()).num_encoded == 3


def test_a_prefix_with_the_same_pictures_is_found_and_no_other(case, told):
    seen = same(case, told, config(), together=False, rounds=2)
    most = sum((len(prompt.ids) - 1) // 16 * 16 for prompt, _ in told)
    assert seen.outcome.num_cached_tokens == most
    first = same(case, told, config(), together=False)
    assert first.outcome.num_cached_tokens == 0  # the fifth begins with the ids of the third


@pytest.mark.parametrize("budget", [7, 13])
def test_chunks_cut_through_pictures(case, told, budget):
    if case.family.whole_items:
        pytest.skip("its pictures are never cut")
    seen = same(case, told, config(max_num_batched_tokens=budget, max_num_seqs=3, enable_prefix_caching=False))
    assert seen.num_encoded == 3


def test_preemption_encodes_nothing_again(case, told):
    seen = same(case, told, config(max_num_batched_tokens=64, max_num_seqs=3), preempting=True)
    assert seen.outcome.num_preemptions > 3
    assert seen.num_encoded == 3


def test_a_small_cache_encodes_again_and_changes_nothing(case, told):
    longest = max(len(picture.ids) for picture in case.pictures)
    options = config(encoder_cache_size=longest, max_num_encoder_tokens=1, enable_prefix_caching=False, max_num_seqs=3)
    assert same(case, told, options).num_encoded > 3


async def test_an_item_that_cannot_be_encoded_ends_its_request_alone(case, told):
    ((good, reference),) = told[2:3]
    broken = Prompt.of(
        case.text(4), Medium({name: each[..., :1] for name, each in case.pictures[0].inputs.items()}, (IMAGE,), IMAGE)
    )
    parts = await engine_parts(case.ours, config())
    engine, params = make_engine(parts, config()), SamplingParams(MAX_TOKENS, temperature=0.0)
    ids: list[int] = []
    errors = []
    try:
        requests = [Request(str(i), each.ids, params, media=each.media) for i, each in enumerate((broken, good))]
        async with engine.submit(requests) as stream:
            async for outputs in stream:
                for output in outputs:
                    ids += output.token_ids if output.index else []
                    errors += [(output.index, output.finish)] if output.error else []
    finally:
        await engine.close()
    assert errors == [(0, FinishReason.ERROR)]
    assert ids == reference.token_ids
