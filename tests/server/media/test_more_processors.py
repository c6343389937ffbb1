"""Processors that need torchvision or torchaudio, where these are installed: what they make of an item is what they make of a whole
conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import transformers

from server.config.server_config import ServerConfig
from server.http.offload import to_the_end
from server.media.limits import MediaLimits
from server.media.media_options import MediaOptions
from server.media.part import Given, MediaPart
from server.media.placeholders import PromptMedia, ReadMedia
from server.media.processor import Processor
from server.media.sound import read_sound
from server.media.video import read_video
from tests.server.media.pictures import drawn
from tests.server.media.processors import tokenizer
from tests.server.media.sounds import sine, video_with_sound

PICTURES = [drawn(24, 16, 1), drawn(40, 70, 2), drawn(64, 20, 3)]
SOUNDS = [sine(0.4), sine(1.1, pitch=700.0)]


class Kind(NamedTuple):
    """`made`: transformers' processor, and what the model's config calls the token that takes outputs. `joined`: names of tensors
    that stand side by side as they are."""

    package: str
    made: Callable[[], tuple[Any, dict[str, str]]]
    modality: str
    joined: tuple[str, ...]


def llama4() -> tuple[Any, dict[str, str]]:
    tokens = [
        "<|image|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|patch|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    ]
    images = transformers.Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=4)
    return transformers.Llama4Processor(images, tokenizer(tokens), patch_size=14), {"image_token_index": "<|patch|>"}


def pixtral() -> tuple[Any, dict[str, str]]:
    from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor

    images = PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    backend = tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    return transformers.PixtralProcessor(images, backend, patch_size=8), {"image_token_index": "[IMG]"}


def phi4() -> tuple[Any, dict[str, str]]:
    named = {"image_token": "<|image|>", "audio_token": "<|audio|>"}
    processor = transformers.Phi4MultimodalProcessor(
        transformers.Phi4MultimodalImageProcessor(size={"height": 56, "width": 56}, patch_size=14, dynamic_hd=4),
        transformers.Phi4MultimodalFeatureExtractor(),
        tokenizer([*named.values()], **named),
    )
    return processor, {"image_token_id": "<|image|>", "audio_token_id": "<|audio|>"}


def granite_speech() -> tuple[Any, dict[str, str]]:
    sounds = transformers.GraniteSpeechFeatureExtractor()
    return transformers.GraniteSpeechProcessor(sounds, tokenizer(["<|audio|>"])), {"audio_token_index": "<|audio|>"}


KINDS = {
    "llama 4": Kind("torchvision", llama4, "image", ("pixel_values",)),
    "pixtral": Kind("torchvision", pixtral, "image", ("image_sizes",)),
    "phi 4, pictures": Kind("torchvision", phi4, "image", ("image_sizes",)),
    "phi 4, sounds": Kind("torchvision", phi4, "audio", ("audio_embed_sizes",)),
    "granite speech": Kind("torchaudio", granite_speech, "audio", ()),
}


@pytest.mark.parametrize("name", KINDS)
def test_items_stand_in_a_prompt_as_those_of_a_whole_conversation(name, tmp_path):
    kind = KINDS[name]
    pytest.importorskip(kind.package)
    theirs, named = kind.made()
    theirs.save_pretrained(tmp_path)
    ids = {key: theirs.tokenizer.convert_tokens_to_ids(token) for key, token in named.items()}
    (tmp_path / "config.json").write_text(json.dumps(ids))
    ours = Processor.load(tmp_path, ids)
    values = PICTURES if kind.modality == "image" else SOUNDS
    options = {} if kind.modality == "image" else {"sampling_rate": ours.sampling_rate}
    read = [
        ReadMedia(kind.modality, b"%d" % at, *ours.process(kind.modality, value, options))
        for at, value in enumerate(values)
    ]
    media = PromptMedia(read, ours.tokens, ours.output_ids)
    text = "see " + " and ".join([ours.tokens[kind.modality]] * len(values)) + "!"
    written, ordered = media.written(text)
    found, items = media.placed(theirs.tokenizer(written)["input_ids"], ordered)
    argument = "images" if kind.modality == "image" else "audio"
    expected = theirs(text=[text], **{argument: values}, return_tensors="pt", **options)
    assert found == expected["input_ids"][0].tolist()
    taker = ours.output_ids[kind.modality]
    assert [place for item in items for place in item.positions.tolist()] == [
        place for place, each in enumerate(found) if each == taker
    ]
    for name in kind.joined:
        joined = np.concatenate([item.inputs[name] for item in items])
        assert np.allclose(joined, expected[name].float().numpy(), rtol=0, atol=1e-5), name


def omni() -> tuple[Any, dict[str, str]]:
    named = {
        "image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>", "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
    }  # fmt: skip
    sizes = {"patch_size": 4, "min_pixels": 64, "max_pixels": 1024}
    processor = transformers.Qwen2_5OmniProcessor(
        transformers.Qwen2VLImageProcessor(**sizes), transformers.Qwen2VLVideoProcessor(**sizes),
        transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=20), tokenizer([*named.values()], **named),
    )  # fmt: skip
    return processor, {f"{name}_token_id": named[f"{name}_token"] for name in ("image", "audio", "video")}


async def test_a_video_that_is_heard_stands_in_a_prompt_as_transformers_has_it(tmp_path):
    pytest.importorskip("torchvision")
    theirs, named = omni()
    theirs.save_pretrained(tmp_path)
    ids = {key: theirs.tokenizer.convert_tokens_to_ids(token) for key, token in named.items()}
    options = MediaOptions(ServerConfig(mm_processor_kwargs='{"use_audio_in_video": true}'))
    reader = options.reader_of(Processor.load(tmp_path, ids), frozenset({"image", "audio", "video"}), None)
    assert reader.probe() == {}
    data = video_with_sound(40, sine(5.0))
    media = await reader.read([MediaPart("video", Given(data), "where", "video_url")])
    text, ordered = media.written("see <|vision_bos|><|VIDEO|><|vision_eos|>!")
    found, (seen, heard) = media.placed(theirs.tokenizer(text)["input_ids"], ordered)
    shown = to_the_end(read_video(data, "x", MediaLimits(), {"fps": 2.0}))
    samples = to_the_end(read_sound(data, "x", rate=16_000, max_seconds=60))
    expected = theirs(
        text=["see <|vision_bos|><|VIDEO|><|vision_eos|>!"], videos=[shown.frames], audio=[samples], audio_from_video_indices=[0],
        load_audio_from_video=True, video_metadata=[shown.metadata], do_sample_frames=False, fps=2.0, return_tensors="pt",
        sampling_rate=16_000,
    )  # fmt: skip
    assert found == expected["input_ids"][0].tolist()
    for item, names in (
        (seen, ("pixel_values_videos", "video_grid_thw")),
        (heard, ("input_features", "feature_attention_mask")),
    ):
        for name in names:
            assert np.array_equal(item.inputs[name], expected[name].numpy()), name
    assert float(seen.inputs["video_second_per_grid"][0]) == 1.0
    assert int(heard.positions[0]) < int(seen.positions[-1])  # they take turns
