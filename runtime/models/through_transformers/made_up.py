"""Artificial media items to test an encoder: blank images and videos, and silent audio, in the form of processor outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from runtime.api.media import MediaItem

Inputs = Mapping[str, np.ndarray[Any, Any]]
_SECONDS = 10  # length of artificial audio; one hundred frames per second
_FRAMES_PER_TOKEN = 8  # in Phi-4's audio
_VIDEO_FRAMES = 4


def on_a_grid(vision: Any, modality: str, steps: int, side: int, number: int) -> MediaItem:
    """Return `steps` grey frames of `side` by `side` tokens, for an encoder of patches. `number` makes items distinct."""
    merge_size, patch_size = vision.spatial_merge_size, vision.patch_size
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    patches = steps * (side * merge_size) ** 2
    pixels = np.zeros((patches, channels * vision.temporal_patch_size * patch_size**2), np.float32)
    grid = np.array([[steps, side * merge_size, side * merge_size]])
    names = ("pixel_values", "image_grid_thw") if modality == "image" else ("pixel_values_videos", "video_grid_thw")
    positions = np.arange(steps * side**2, dtype=np.int32)
    digest = b"sample %d %d %d" % (steps, side, number)
    return MediaItem(modality, digest, positions, dict(zip(names, (pixels, grid), strict=True)))


def of_one_size(config: Any, modality: str) -> Iterator[Inputs]:
    """Yield candidates for the inputs of an encoder of square images. The caller uses the first one that works. Pixels are not 0,
    because some encoders treat 0 as padding."""
    size: Any = getattr(config.vision_config, "image_size", None)
    sides = (size, size) if isinstance(size, int) else tuple(size or ())
    if modality == "video":
        yield {"pixel_values_videos": np.ones((1, _VIDEO_FRAMES, 3, *sides), np.float32)}
        return
    sizes = np.array([sides])
    if hasattr(config, "image_grid_pinpoints"):  # the whole image, and tiles
        num = image_size_to_num_patches(list(sides), config.image_grid_pinpoints, size)
        yield {"pixel_values": np.ones((1, num, 3, *sides), np.float32), "image_sizes": sizes}
        return
    plain = {"pixel_values": np.ones((1, 3, *sides), np.float32)}
    yield plain
    yield plain | {"image_sizes": sizes}
    yield {
        "pixel_values": np.ones((1, 1, 3, *sides), np.float32),
        "pixel_attention_mask": np.ones((1, 1, *sides), np.int64),
    }


def crops(vision: Any) -> Inputs:
    """Return the inputs of an image for Phi-4: the whole image and one crop."""
    side = vision.crop_size
    return {
        "image_pixel_values": np.zeros((1, 2, 3, side, side), np.float32),
        "image_sizes": np.array([[side, side]]),
        "image_attention_mask": np.ones((1, 2, *(side // vision.patch_size,) * 2), np.int64),
    }


def sound(config: Any) -> Inputs:
    """Return silence under all names of processor outputs for audio. Raises AttributeError if `config` has no audio options."""
    if hasattr(config, "encoder_config"):  # Granite: frames are rows
        return {"input_features": np.zeros((1, 100 * _SECONDS, config.encoder_config.input_dim), np.float32)}
    audio = config.audio_config
    if hasattr(audio, "input_size"):  # Phi-4
        frames = 100 * _SECONDS // _FRAMES_PER_TOKEN * _FRAMES_PER_TOKEN
        return {
            "audio_input_features": np.zeros((1, frames, audio.input_size), np.float32),
            "audio_embed_sizes": np.array([frames // _FRAMES_PER_TOKEN]),
        }
    frames = 2 * audio.max_source_positions
    return {
        "input_features": np.zeros((1, audio.num_mel_bins, frames), np.float32),
        "feature_attention_mask": np.ones((1, frames), np.int64),
    }
