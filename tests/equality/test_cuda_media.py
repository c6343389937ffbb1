"""The CUDA engine computes prompts with pictures, videos and sounds as transformers does: by graphs behind them and without, in
chunks, and again."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.config import EngineConfig
from tests.equality.greedy import compare
from tests.equality.media import Prompt, run
from tests.equality.test_media import FAMILIES, IMAGE, PARAMS, drawn, load, medium
from tests.equality.test_videos_and_sounds import CASES, asked, heard_beside_pictures

pytestmark = pytest.mark.gpu

SEEN = ("llava 1.5", "gemma 3", "mistral 3", "qwen 2.5 vl", "qwen 3 vl", "llama 4", "paligemma 2")
HEARD = (
    "qwen 2.5 vl", "qwen 3 vl", "llava-onevision", "qwen 2.5 omni, sounds", "qwen 2.5 omni, videos", "qwen 3 omni, sounds",
    "qwen 3 omni, videos", "phi 4 multimodal, pictures", "phi 4 multimodal, sounds", "voxtral", "granite speech",
)  # fmt: skip


@pytest.fixture(scope="module", params=SEEN)
def case(request, tmp_path_factory):
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("model")
    theirs = drawn(family)
    theirs.save_pretrained(folder)
    rng = np.random.default_rng(2)
    a, b, c = (medium(theirs, family.draw(rng, index == 1)) for index in range(3))
    text = [int(each) for each in rng.integers(3, IMAGE, 40)]
    prompts = [
        Prompt.of(text[:9]),
        Prompt.of(a, text[:5]),
        Prompt.of(text[:7], a, text[:6], b),
        Prompt.of(text[:3], b, text[:2], a, text[:20], c, text[:2]),
        Prompt.of(text[:7], b, text[:6], a),
    ]
    return family, load(folder, "cuda"), prompts, [family.reference(theirs, prompt) for prompt in prompts]


def config(**options) -> EngineConfig:
    return EngineConfig(
        **{
            "device": "cuda",
            "dtype": "float32",
            "num_kv_blocks": 128,
            "max_num_seqs": 8,
            "max_model_len": 256,
            **options,
        }
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 40}, {"max_num_batched_tokens": 256, "rounds": 2}],
    ids=lambda options: ", ".join(f"{key} {value}" for key, value in options.items()) or "as it comes",
)
def test_float32_equals_transformers(case, options):
    family, ours, prompts, told = case
    options = dict(options)
    rounds = options.pop("rounds", 1)
    if family.whole_prompts:
        options.pop("max_num_batched_tokens", None)
    seen = run(ours, config(**options), prompts, PARAMS, rounds=rounds)
    assert compare(seen.outcome, told) <= 1
    assert seen.num_encoded == 3


@pytest.mark.parametrize("name", HEARD)
def test_videos_and_sounds_equal_transformers(name, tmp_path):
    prompts, told = asked(CASES[name], tmp_path)
    seen = run(load(tmp_path, "cuda"), config(max_num_batched_tokens=13, max_num_seqs=3), prompts, PARAMS, rounds=2)
    assert compare(seen.outcome, told) <= 1
    assert seen.num_encoded == 3


def test_sounds_beside_pictures_equal_transformers(tmp_path):
    prompts, told = heard_beside_pictures(tmp_path)
    seen = run(load(tmp_path, "cuda"), config(), prompts, PARAMS, together=False, rounds=2)
    assert compare(seen.outcome, told) == 0
    assert seen.num_encoded == 3  # the picture, and the sound twice
