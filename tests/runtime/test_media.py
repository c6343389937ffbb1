"""The border of pictures and sounds: what is refused, and what blocks that hold some are called in the prefix cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtime.api import MediaItem, PreparedPrompt, Request, SamplingParams
from runtime.api.media import media_of_blocks
from runtime.engine.prompt import prepare
from runtime.kv.prefix_cache import PrefixCache
from tests.fake_runner import FakeRunner, model_info
from tests.runtime.test_engine import engine_on

TEXT = model_info(max_model_len=64)
SEES = replace(TEXT, modalities=frozenset({"image"}))
ROOT = (None, 0)


def item(*positions: int, digest: bytes = b"a", modality: str = "image") -> MediaItem:
    return MediaItem(modality, digest, np.array(positions, np.int32), {})


def request(*media: MediaItem, num_tokens: int = 12) -> Request:
    return Request("one", [7] * num_tokens, SamplingParams(2), media=media)


async def test_a_model_of_text_refuses_a_picture_by_name():
    async with engine_on(FakeRunner(), model=TEXT) as engine:
        with pytest.raises(ValueError, match=f"{TEXT.architecture} does not accept image: it takes text alone"):
            engine.submit([request(item(1))])


@pytest.mark.parametrize(
    ("media", "complaint"),
    [
        ([item(1, modality="audio")], "does not accept audio: it takes image beside text"),
        ([item()], "without a position"),
        ([item(2, 1)], "not ascending"),
        ([item(1, 1)], "not ascending"),
        ([item(-1, 1)], "after the previous item"),
        ([item(1, 4), item(4, 5)], "after the previous item"),
        ([item(3, 5), item(1, 4)], "after the previous item"),
        ([item(11, 12)], "ends after the prompt's 12 tokens"),
    ],
)
def test_what_does_not_stand_in_the_prompt_is_refused(media, complaint):
    with pytest.raises(ValueError, match=complaint):
        SEES.check(request(*media))


def test_what_stands_there_is_taken():
    SEES.check(request(item(0, 1, 3), item(4), item(11)))
    SEES.check(request(item(1, 4), item(3, 5)))  # as the tokens of a video and of its sound


async def test_a_prompt_prepared_with_other_media_is_refused():
    async with engine_on(FakeRunner(), model=SEES) as engine:
        one = request(item(1, 2))
        prepared = engine.prepare(one.prompt_ids, media=(item(1, 2),))
        assert isinstance(prepared, PreparedPrompt)
        with pytest.raises(ValueError, match="another cache_salt, adapter or media"):
            engine.submit([replace(one, prepared=prepared)])


def test_blocks_of_the_same_ids_and_other_pictures_have_other_names_from_the_first_that_holds_some():
    cache, ids = PrefixCache(4), [7] * 20
    names = {
        what: prepare(cache, 100, ids, ROOT, media).block_hashes
        for what, media in {
            "none": (),
            "a": (item(5, 6, 7, 8, 9),),
            "the same again": (item(5, 6, 7, 8, 9),),
            "b": (item(5, 6, 7, 8, 9, digest=b"b"),),
            "a later": (item(6, 7, 8, 9, 10),),
            "two": (item(5, 6), item(7, 8, 9)),
        }.items()
    }
    assert names["a"] == names["the same again"]
    first, *others = names["none"]
    assert all(each[0] == first for each in names.values())
    different = [each[1:] for what, each in names.items() if what != "the same again"]
    assert len({name for each in different for name in each}) == 5 * len(others)


@pytest.mark.parametrize("known", [0, 4, 8, 12])
def test_hashes_go_on_from_any_block(known):
    cache, ids, media = PrefixCache(4), list(range(20)), (item(3, 4), item(9, 10, 13))
    extras = media_of_blocks(media, 4)
    assert set(extras) == {0, 1, 2, 3}
    whole = cache.hash_blocks(ids, ROOT, extras=extras)
    assert prepare(cache, 100, ids, ROOT, media).block_hashes == whole
    rest = cache.hash_blocks(ids[known:], ROOT, whole[known // 4 - 1] if known else None, extras, known // 4)
    assert rest == whole[known // 4 :]
