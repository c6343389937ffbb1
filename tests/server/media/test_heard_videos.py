"""Videos that are heard, too: their sound is an item of its own, whose tokens stand among theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from server.config.server_config import ServerConfig
from server.http.errors import InvalidRequest
from server.media.media_options import MediaOptions
from server.media.placeholders import Expansion, PlaceholderError, PromptMedia, ReadMedia
from server.media.processor import Processor
from tests.server.media.processors import tokenizer
from tests.server.media.reading import part
from tests.server.media.sounds import sine, video, video_with_sound

TOKENS = ("<bos>", "<eos>", "<A>", "<V>", "<I>")
HEARS = {"mm_processor_kwargs": '{"use_audio_in_video": true}'}


class Omni:
    """As transformers' processors of such models are called, and what they give. Two tokens a frame, one a second of sound."""

    image_token, audio_token, video_token = "<I>", "<A>", "<V>"
    load_audio_from_video = False
    image_processor = audio_processor = video_processor = type("Part", (), {"sampling_rate": 16_000})()

    def __init__(self) -> None:
        self.tokenizer = tokenizer(list(TOKENS))
        self.given: list[dict[str, Any]] = []

    def __call__(self, text, videos=None, audio=None, images=None, **options) -> dict[str, Any]:
        self.given.append(options)
        made: dict[str, Any] = {}
        if videos is None:
            replaced = "<A>" if images is None else "<I>"
        elif audio is None:
            replaced = "<V><V>" * len(videos[0])
        else:
            assert options["audio_from_video_indices"] == [0]
            replaced = "<bos>" + "<V><V>" * len(videos[0]) + "<A>" * (len(audio[0]) // 16_000) + "<eos>"
            made["input_features"] = np.asarray(audio[0])
        if videos is not None:
            made |= {"pixel_values_videos": np.asarray(videos[0]), "video_second_per_grid": np.ones(1)}
        return made | {"text_replacement_offsets": [[{"replacement": replaced}]]}


def reader(**options: Any):
    theirs = Omni()
    config = {
        f"{name}_token_id": theirs.tokenizer.convert_tokens_to_ids(f"<{name[0].upper()}>")
        for name in ("image", "audio", "video")
    }
    made = MediaOptions(ServerConfig(**options)).reader_of(
        Processor(theirs, config), frozenset({"image", "audio", "video"}), None
    )
    return made, theirs


def test_runs_of_either_are_told_apart():
    found = Expansion.of("<b><V><V><A><V><A><A><e>", "<V>", "<A>")
    assert (found.text, found.runs, found.heard) == ("<b><V><A><V><A><e>", (2, 1, 1, 2), frozenset({1, 3}))
    assert Expansion.of("<V><V><A>", "<V>") == Expansion("<V><A>", (2,))


def test_the_sound_is_an_item_behind_its_video():
    tensors = {"pixel_values_videos": np.zeros(1)}, {"input_features": np.zeros(2)}
    read = ReadMedia("video", b"v", Expansion.of("b<V><V><A><V><A><A>e", "<V>", "<A>"), *tensors)
    media = PromptMedia([read], {"video": "<V>", "audio": "<A>"}, {"video": 7, "audio": 8})
    text, ordered = media.written("x<V>y")
    assert text == "xb<V><A><V><A>ey"
    ids, (seen, heard) = media.placed([1, 2, 7, 8, 7, 8, 3, 4], ordered)
    assert ids == [1, 2, 7, 7, 8, 7, 8, 8, 3, 4]
    assert (seen.modality, seen.positions.tolist(), seen.inputs) == ("video", [2, 3, 5], tensors[0])
    assert (heard.modality, heard.positions.tolist(), heard.inputs) == ("audio", [4, 6, 7], tensors[1])
    assert seen.digest != heard.digest
    assert read.num_bytes == sum(each.nbytes for inputs in tensors for each in inputs.values())
    with pytest.raises(PlaceholderError):
        media.placed([1, 2, 7, 7, 8, 8, 3, 4], ordered)


def test_a_sound_of_no_tokens_is_no_item():
    read = ReadMedia("video", b"v", Expansion.of("<V><V>", "<V>", "<A>"), {}, {"input_features": np.zeros(0)})
    media = PromptMedia([read], {"video": "<V>", "audio": "<A>"}, {"video": 7, "audio": 8})
    _, ordered = media.written("<V>")
    ids, items = media.placed([7], ordered)
    assert (ids, [item.modality for item in items]) == ([7, 7], ["video"])


async def test_a_file_with_both_is_seen_and_heard_where_it_is_asked_for():
    made, theirs = reader(**HEARS)
    (read,) = (await made.read([part(video_with_sound(24, sine(3.0)), "video")])).read
    assert read.expansion.text == "<bos><V><A><eos>"
    assert read.expansion.runs[0] == 2 * 6  # three seconds, of which two frames each are shown
    assert read.expansion.runs[1] in (2, 3)  # a codec's pieces are no whole seconds
    assert set(read.inputs) == {"pixel_values_videos", "video_second_per_grid"}
    assert set(read.sound) == {"input_features"}
    assert theirs.given[-1]["fps"] == 2.0
    assert "use_audio_in_video" not in theirs.given[-1]
    plain, _ = reader()
    (seen,) = (await plain.read([part(video_with_sound(24, sine(3.0)), "video")])).read
    assert (seen.sound, seen.expansion.runs) == (None, (12,))
    (asked,) = (await plain.read([part(video_with_sound(24, sine(3.0)), "video")], {"use_audio_in_video": True})).read
    assert asked.sound is not None
    assert asked.digest != seen.digest


async def test_a_silent_video_is_seen_alone():
    made, theirs = reader(**HEARS)
    (read,) = (await made.read([part(video(24), "video")])).read
    assert read.sound is None
    assert theirs.given[-1]["fps"] == 2.0
    many, theirs = reader(**HEARS, media_io_kwargs='{"video": {"num_frames": 12}}')
    await many.read([part(video(24), "video")])
    assert theirs.given[-1]["fps"] == 4.0  # as many as are shown
    assert many.probe() == {}


async def test_a_model_that_hears_no_videos_says_so():
    made, theirs = reader()
    made.modalities -= {"audio"}
    with pytest.raises(InvalidRequest, match="use_audio_in_video: this model does not support audio of videos"):
        await made.read([part(video(24), "video")], {"use_audio_in_video": True})
    assert not theirs.given
