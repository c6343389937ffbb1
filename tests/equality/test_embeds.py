"""Embeddings in the place of what has them: of a prompt's ids, and of a picture whose encoder ran elsewhere: the same tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from runtime.api import EMBEDS, MediaItem, Request
from runtime.config import EngineConfig
from tests.equality.greedy import engine_parts, make_engine
from tests.equality.media import Prompt, run
from tests.equality.test_media import FAMILIES, LLAMA, PARAMS, TEXT, drawn, load, medium, with_random_numbers

OPTIONS = {"num_kv_blocks": 64, "max_model_len": 256, "enable_prompt_embeds": True}


def embeds(vectors: np.ndarray, start: int, modality: str = EMBEDS, **more: np.ndarray) -> MediaItem:
    positions = np.arange(start, start + len(vectors), dtype=np.int32)
    return MediaItem(modality, vectors.tobytes()[:32], positions, {EMBEDS: vectors, **more})


@pytest.fixture(scope="module", params=["llama", "gemma"])
def texts(request, tmp_path_factory):
    """A model of text, and the embeddings of its ids as transformers' inputs_embeds has them."""
    torch.manual_seed(5)
    kind = {"llama": transformers.LlamaConfig, "gemma": transformers.GemmaConfig}[request.param]
    extra = {"head_dim": 16} if request.param == "gemma" else {}
    config = kind(**{k: v for k, v in (TEXT | LLAMA | extra).items() if k != "model_type"}, attn_implementation="eager")
    theirs = with_random_numbers(transformers.AutoModelForCausalLM.from_config(config).eval())
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    with torch.inference_mode():
        table = theirs.get_input_embeddings()(torch.arange(TEXT["vocab_size"])).numpy()
    return load(folder), table


@pytest.mark.parametrize("budget", [8192, 13])
def test_a_prompt_of_embeddings_is_answered_as_one_of_their_ids(texts, budget):
    ours, table = texts
    rng = np.random.default_rng(1)
    prompts = [Prompt([int(each) for each in rng.integers(3, 90, length)], ()) for length in (5, 40, 23)]
    given = [Prompt([0] * len(each.ids), (embeds(table[each.ids], 0),)) for each in prompts]
    config = EngineConfig(**OPTIONS, max_num_batched_tokens=budget, max_num_seqs=3)
    plain, embedded = (run(ours, config, each, PARAMS).outcome for each in (prompts, given))
    assert embedded.token_ids == plain.token_ids
    again = run(ours, config, given, PARAMS, rounds=2).outcome
    assert again.token_ids == plain.token_ids
    assert again.num_cached_tokens


@pytest.mark.parametrize("name", ["llava 1.5", "gemma 3", "qwen 2.5 vl", "qwen 3 vl"])
def test_a_picture_that_was_encoded_elsewhere_is_seen_as_if_it_were_here(name, tmp_path):
    family = FAMILIES[name]
    theirs = drawn(family)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    picture = medium(theirs, family.draw(np.random.default_rng(2), False))
    prompt = Prompt.of([5, 6, 7], picture, [8, 9])
    (item,) = prompt.media
    (outputs,) = ours.encoder.encode([item])
    grids = {key: each for key, each in item.inputs.items() if key.endswith("_thw")}
    other = replace(item, inputs={EMBEDS: outputs.numpy(), **grids}, digest=b"other")
    config = EngineConfig(num_kv_blocks=64, max_model_len=256)
    seen, given = (
        run(ours, config, [each], PARAMS).outcome.token_ids for each in (prompt, Prompt(prompt.ids, (other,)))
    )
    assert given == seen


async def test_embeddings_of_another_size_or_without_leave_are_refused(texts):
    ours, table = texts
    for allowed, width, complaint in (
        (True, -1, r"embeddings \[3, 63\] for 3 tokens: those of this model are \[3, 64\]"),
        (False, None, "does not accept embeds"),
    ):
        config = EngineConfig(**{**OPTIONS, "enable_prompt_embeds": allowed})
        engine = make_engine(await engine_parts(ours, config), config)
        try:
            vectors = np.ascontiguousarray(table[:3, :width])
            with pytest.raises(ValueError, match=complaint):
                engine.submit([Request("r", [0] * 3, PARAMS, media=(embeds(vectors, 0),))])
        finally:
            await engine.close()
