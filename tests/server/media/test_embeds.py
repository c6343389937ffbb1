"""Embeddings that clients bring: safetensors files and nothing else, only where they are let in, in the place of what has them."""

from __future__ import annotations

import base64
import json
import pickle
import struct

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from runtime.api import EMBEDS
from server.http.errors import InvalidMedia, InvalidRequest
from server.media.embeds import read_embeds
from server.media.part import Base64, MediaPart
from tests.server.media.processors import written
from tests.server.media.reading import prompt, seeing
from tests.server.test_refusals import error_of

VECTORS = np.arange(12, dtype=np.float32).reshape(3, 4)
GRID = np.array([[1, 4, 8]])


def stored(**arrays: np.ndarray) -> bytes:
    return safetensors.numpy.save(arrays or {"image_embeds": VECTORS})


def described(entry: object, body: bytes = b"\0" * 48) -> bytes:
    head = json.dumps({"x": entry}).encode()
    return struct.pack("<Q", len(head)) + head + body


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_type_of_numbers_becomes_float32(dtype):
    data = safetensors.torch.save({"x": torch.from_numpy(VECTORS).to(dtype)}, metadata={"by": "a test"})
    read = read_embeds(data, "where")
    assert read[EMBEDS].dtype == np.float32
    assert read[EMBEDS].tolist() == VECTORS.tolist()


def test_a_grid_stands_beside_them():
    read = read_embeds(stored(image_embeds=VECTORS, image_grid_thw=GRID.reshape(3).astype(np.int32)), "where")
    assert read["image_grid_thw"].tolist() == GRID.tolist()


class Runs:
    """What a pickle may bring."""

    def __reduce__(self):
        return (pytest.fail, ("it was run",))


WHOLE = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}


@pytest.mark.parametrize(("data", "complaint"), [
    (pickle.dumps(Runs()), "no safetensors file"),
    (b"", "no safetensors file"),
    (b"\xff" * 64, "no safetensors file"),
    (struct.pack("<Q", 1 << 40), "no safetensors file"),
    (struct.pack("<Q", 2) + b"[]", "no safetensors file"),
    (struct.pack("<Q", 2) + b"{}", "it has 0 arrays"),
    (stored(a=VECTORS, b=VECTORS), "it has 2 arrays"),
    (stored(**{str(n): VECTORS for n in range(9)}), "it has 9 arrays; at most 8"),
    (stored(a=VECTORS.astype(np.float64)), "is of type F64"),
    (stored(a=VECTORS.astype(np.int64)), r"a is int64 \[3, 4\], not numbers"),
    (stored(a=VECTORS[0]), r"a is float32 \[4\], not numbers"),
    (stored(a=VECTORS[:0]), "has no shape"),
    (stored(a=np.full((2, 2), np.nan, np.float32)), "contains NaN or infinity"),
    (stored(a=VECTORS, image_grid_thw=GRID.astype(np.float32)), "image_grid_thw is float32"),
    (stored(a=VECTORS, image_grid_thw=np.ones((2, 3), np.int64)), "not three counts"),
    (stored()[:-1], "has 48 bytes in a file of 47, and 48 by its shape"),
    (struct.pack("<Q", 60_000) + b"[" * 60_000, "no safetensors file"),
    (described({"dtype": "F32", "shape": [0] + [1 << 39] * 3, "data_offsets": [0, 0]}), "has no shape"),
    (described(5), "has no valid description"),
    (described(WHOLE | {"shape": [3, -4]}), "has no shape"),
    (described(WHOLE | {"shape": [1 << 39, 1 << 39]}), "by its shape"),
    (described(WHOLE | {"shape": [True, 4]}), "has no shape"),
    (described(WHOLE | {"data_offsets": [48, 0]}), "has -48 bytes"),
    (described(WHOLE | {"dtype": ["F32"]}), "is of type"),
])  # fmt: skip
def test_what_is_no_such_file_is_refused(data, complaint):
    with pytest.raises(InvalidMedia, match=complaint):
        read_embeds(data, "where")


# --- in the place of a picture or a sound -------------------------------------------------------------------------


def given(data: bytes, modality="image") -> MediaPart:
    return MediaPart(modality, Base64(base64.b64encode(data).decode()), "where", f"{modality}_embeds", is_embeds=True)


@pytest.mark.parametrize(("kind", "modality", "around"), [
    ("llava", "image", ("<image>", "<image>")),
    ("gemma3", "image", ("<start_of_image>", "<end_of_image>")),
    ("qwen2_vl", "image", ("<|vision_start|>", "<|vision_end|>")),
    ("qwen2_audio", "audio", ("<|AUDIO|>", "<|AUDIO|>")),
])  # fmt: skip
async def test_they_stand_where_the_models_encoder_would_put_its_own(kind, modality, around, tmp_path):
    loaded = seeing(written(kind, tmp_path), enable_mm_embeds=True)
    assert not loaded.media.probe()
    found = await prompt(loaded, ["See ", given(stored(), modality), "!"])
    [item] = found.media
    tokens = loaded.tokenizer.decode(found.prompts[0], skip_special_tokens=False)
    assert around[0] in tokens
    assert around[1] in tokens
    assert [found.prompts[0][position] for position in item.positions] == [
        loaded.media.processor.output_ids[modality]
    ] * 3
    assert item.inputs[EMBEDS].tolist() == VECTORS.tolist()
    other = await prompt(loaded, ["See ", given(stored(a=VECTORS + 1), modality), "!"])
    assert other.media[0].digest != item.digest


async def test_where_text_stands_among_an_items_tokens_they_are_refused(tmp_path):
    loaded = seeing(written("idefics3", tmp_path), enable_mm_embeds=True)
    loaded.media.probe()
    with pytest.raises(InvalidMedia, match="this model has text between the tokens of an item"):
        await prompt(loaded, [given(stored())])


async def test_nobody_is_let_in_without_the_operators_leave(tmp_path):
    with pytest.raises(InvalidRequest, match="does not accept image_embeds: start it with --enable-mm-embeds"):
        await prompt(seeing(written("llava", tmp_path)), [given(stored())])


async def test_a_chat_spells_them_as_vllm_does(serve, tmp_path):
    loaded = seeing(written("llava", tmp_path), enable_mm_embeds=True)
    loaded.media.probe()
    server = await serve("Yes", speaks=loaded.tokenizer, template=loaded.chat_template, media=loaded.media)
    part = {"type": "image_embeds", "image_embeds": base64.b64encode(stored()).decode()}
    answer = await server.chat(messages=[{"role": "user", "content": [part]}])
    assert answer.status_code == 200, answer.text
    assert len(server.engine.submitted[0].media[0].positions) == 3
    part["image_embeds"] = base64.b64encode(pickle.dumps(Runs())).decode()
    error = error_of(await server.chat(messages=[{"role": "user", "content": [part]}]), 400)
    assert error["param"] == "messages[0].content[0].image_embeds"
    assert "no safetensors file" in error["message"]


# --- in the place of a prompt -------------------------------------------------------------------------------------

PROMPT = base64.b64encode(stored()).decode()


async def test_a_prompt_of_embeddings(serve):
    server = await serve("Yes", enable_prompt_embeds=True)
    answer = await server.post("/v1/completions", {"prompt_embeds": PROMPT, "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 3
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    [request] = server.engine.submitted
    assert list(request.prompt_ids) == [0, 0, 0]
    [item] = request.media
    assert (item.modality, item.positions.tolist()) == (EMBEDS, [0, 1, 2])
    assert item.inputs[EMBEDS].tolist() == VECTORS.tolist()


@pytest.mark.parametrize(("body", "param", "complaint"), [
    ({"prompt_embeds": PROMPT, "prompt": "a"}, "prompt", "contradict"),
    ({"prompt_embeds": PROMPT, "echo": True}, "echo", "contradict"),
    ({"prompt_embeds": PROMPT, "suffix": "b"}, "suffix", "contradict"),
    ({"prompt_embeds": PROMPT, "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "contradict"),
    ({"prompt_embeds": "?"}, "prompt_embeds", "not base64"),
    ({}, "prompt", "Missing required parameter"),
])  # fmt: skip
async def test_what_contradicts_them(serve, body, param, complaint):
    server = await serve("Yes", enable_prompt_embeds=True)
    error = error_of(await server.post("/v1/completions", body), 400)
    assert error["param"] == param
    assert complaint in error["message"]


async def test_a_prompt_of_embeddings_needs_the_operators_leave(serve):
    server = await serve("Yes")
    error = error_of(await server.post("/v1/completions", {"prompt_embeds": PROMPT}), 400)
    assert error["param"] == "prompt_embeds"
    assert "--enable-prompt-embeds" in error["message"]
