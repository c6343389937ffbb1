"""LLM: pictures as programs have them, in messages and beside prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from server import LLM, SamplingParams
from server.media.limits import UNBOUNDED_GB
from tests.server.media import models
from tests.server.media.pictures import data_url, drawn, stored

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PICTURE = drawn(24, 16, 1)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return models.drawn("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(seeing):
    options = {"max_model_len": 512, "num_kv_blocks": 64, "enable_prompt_embeds": True}
    with LLM(str(seeing.tiny.folder), device="cpu", dtype="float32", **options) as llm:
        yield llm


def test_a_program_may_hold_as_much_as_it_asks_for(llm):
    reader = llm._core.loaded.media
    assert reader._held._max_bytes >= UNBOUNDED_GB * 1024**3


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_one_picture_in_every_form_is_one_answer(llm, seeing, tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(stored(PICTURE))
    forms = [
        {"type": "image", "image": PICTURE},
        {"type": "image_pil", "image_pil": PICTURE},
        {"type": "image", "image": np.asarray(PICTURE)},
        {"type": "image", "image": stored(PICTURE)},
        {"type": "image", "image": file},
        {"type": "image", "image": str(file)},
        {"type": "image", "image": f"file://{file}"},
        {"type": "image", "image": data_url(stored(PICTURE))},
        {"type": "image_url", "image_url": {"url": data_url(stored(PICTURE))}},
    ]
    conversations = [
        [{"role": "user", "content": [{"type": "text", "text": "What is "}, form, {"type": "text", "text": "?"}]}]
        for form in forms
    ]
    expected = seeing.answer("[user] What is <image>?", [PICTURE], 6)
    assert ids(llm.chat(conversations, GREEDY, use_tqdm=False)) == [expected] * len(forms)


def test_pictures_beside_a_prompt(llm, seeing):
    other = drawn(40, 70, 2)
    prompts = [
        {"prompt": "A <image> is", "multi_modal_data": {"image": PICTURE}},
        {"prompt": "<image> and <image>:", "multi_modal_data": {"image": [PICTURE, stored(other)]}},
    ]
    expected = [seeing.answer("A <image> is", [PICTURE], 6), seeing.answer("<image> and <image>:", [PICTURE, other], 6)]
    assert ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


@torch.inference_mode()
def test_what_an_encoder_elsewhere_made_of_a_picture_is_seen_like_it(llm, seeing):
    pixels = seeing.tiny.processor(text=["<image>"], images=[PICTURE], return_tensors="pt")["pixel_values"]
    outputs = seeing.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
    vectors = torch.cat(list(outputs))
    expected = seeing.answer("A <image> is", [PICTURE], 6)
    forms = [vectors, vectors[None], {"image_embeds": vectors.numpy()}]
    prompts = [{"prompt": "A <image> is", "multi_modal_data": {"image": form}} for form in forms]
    assert ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == [expected] * 3
    question = [
        {"type": "text", "text": "What is "},
        {"type": "image", "image": PICTURE},
        {"type": "text", "text": "?"},
    ]
    given = [question[0], {"type": "image_embeds", "image_embeds": vectors}, question[2]]
    asked = [[{"role": "user", "content": parts}] for parts in (question, given)]
    seen, told = ids(llm.chat(asked, GREEDY, use_tqdm=False))
    assert told == seen


@torch.inference_mode()
def test_embeddings_in_the_place_of_a_prompt(llm, seeing):
    prompt = [5, 9, 30, 31]
    vectors = seeing.model.get_input_embeddings()(torch.tensor(prompt))
    given = [
        {"prompt_token_ids": prompt},
        {"prompt_embeds": vectors},
        {"prompt_embeds": vectors.bfloat16().float().numpy()[None]},
    ]
    by_ids, by_vectors, _ = llm.generate(given, GREEDY, use_tqdm=False)
    assert by_vectors.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert len(by_vectors.prompt_token_ids) == 4


@pytest.mark.parametrize(("prompt", "reason"), [
    ({"prompt_embeds": np.zeros((2, 64)), "prompt": "a"}, "cannot be combined with prompt"),
    ({"prompt_embeds": np.zeros((2, 63))}, r"embeddings \[2, 63\] for 2 tokens: those of this model are \[2, 64\]"),
    ({"prompt_embeds": np.zeros((2, 3, 64))}, r"not numbers \[tokens, width\]"),
    ({"prompt_embeds": np.array(["a"])}, "prompt_embeds is ndarray, not an array of numbers"),
    ({"prompt_embeds": np.full((2, 64), np.nan)}, "NaN or infinity"),
    ({"prompt": "no place", "multi_modal_data": {"image": PICTURE}}, r"0 placeholders \(<image>\) for 1 images"),
    ({"prompt": "<image><image>", "multi_modal_data": {"image": PICTURE}}, "2 placeholders"),
    ({"prompt": "<image>", "multi_modal_data": {"image": PICTURE}, "mm_processor_kwargs": {"size": 1}}, "size is not one of"),
    ({"prompt": "<image>", "multi_modal_data": {"image": 5}}, "int is not a file, image or array"),
    ({"prompt": "<image>", "multi_modal_data": {"image": b"text"}}, "not a readable image"),
    ({"prompt": "<image>", "multi_modal_data": {"audio": b"text"}}, "accepts text and image only"),
    ({"prompt": "<image>", "multi_modal_data": {"image": "https://a.test/x.png"}}, "fetching URLs is disabled"),
])  # fmt: skip
def test_what_is_refused_says_why(llm, prompt, reason):
    with pytest.raises(ValueError, match=reason):
        llm.generate(prompt, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(("part", "reason"), [
    ({"type": "image", "image": "/no/such/file.png"}, r"messages\[0\]\.content\[0\]: /no/such/file\.png cannot be read"),
    ({"type": "image", "image": PICTURE, "detail": "low"}, "has no key 'detail'"),
    ({"type": "image", "picture": PICTURE}, "cannot be converted to JSON"),
])  # fmt: skip
def test_parts_that_are_none(llm, part, reason):
    with pytest.raises(ValueError, match=reason):
        llm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)


def test_what_is_pooled_is_text(llm):
    with pytest.raises(ValueError, match="not supported for pooling"):
        llm.encode({"prompt": "<image>", "multi_modal_data": {"image": PICTURE}}, use_tqdm=False)
