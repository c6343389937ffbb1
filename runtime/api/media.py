"""Media of a prompt: images, audio and video as processed arrays, with their positions in the prompt.

This module does not decode: its inputs are arrays that a processor has made. It imports the standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Int32s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


EMBEDS: Final = "embeds"
BESIDE_PICTURES: Final = "beside_pictures"


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One image, audio or video of a prompt, ready for the model's encoder.

    `modality`: "image", "audio" or "video"; EMBEDS for prompt tokens that are given as embeddings. `digest`: hash of the
    media's bytes and of all processing options; items with the same digest have the same inputs. `positions` [N] int32:
    ascending prompt positions, one for each encoder output; the token id at each is the model's placeholder. `inputs`: the
    processor's arrays of this item, with the names of the model's own processor (pixel_values, image_grid_thw, …). For EMBEDS,
    they contain the embeddings [N, W] from an encoder elsewhere. Do not modify them."""

    modality: str
    digest: bytes
    positions: Int32s
    inputs: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]


def beside_pictures(media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
    """Return `media`. If it contains both images and audio, its audio items get the additional input BESIDE_PICTURES, because
    some models then encode audio differently."""
    if not {"image", "audio"} <= {item.modality for item in media}:
        return tuple(media)
    import numpy as np

    mark = {BESIDE_PICTURES: np.ones(1, np.int64)}
    return tuple(
        replace(item, digest=sha256(item.digest + b"beside pictures").digest(), inputs={**item.inputs, **mark})
        if item.modality == "audio"
        else item
        for item in media
    )


def check_media(media: Sequence[MediaItem], modalities: frozenset[str], num_tokens: int, architecture: str) -> None:
    """Raise ValueError if `media` contains items that the model does not support or that are out of order.

    Each item's modality must be in `modalities`. Items must be sorted by their first position in a prompt of `num_tokens`
    tokens. Positions of two items may interleave, as those of a video and its audio do, but no position may belong to both."""
    first, taken = -1, set[int]()
    for item in media:
        if item.modality not in modalities:
            takes = f"it takes {', '.join(sorted(modalities))} beside text" if modalities else "it takes text alone"
            raise ValueError(f"{architecture} does not accept {item.modality}: {takes}")
        positions = item.positions.tolist()
        if not positions:
            raise ValueError(f"{item.modality} without a position in the prompt")
        if sorted(set(positions)) != positions:
            raise ValueError(f"positions of the {item.modality} are not ascending")
        if positions[0] <= first or not taken.isdisjoint(positions):
            raise ValueError(f"the {item.modality} must come after the previous item")
        first = positions[0]
        taken.update(positions)
        if positions[-1] >= num_tokens:
            raise ValueError(f"the {item.modality} ends after the prompt's {num_tokens} tokens")


def media_of_blocks(media: Sequence[MediaItem], block_size: int) -> Mapping[int, bytes]:
    """Return what each block's prefix-cache hash includes besides token ids: a digest of the block's media items and their
    positions. The keys are block indices. Blocks without media are absent."""
    digests: dict[int, bytes] = {}
    for item in media:
        for block, first, places in _places(item, block_size):
            digests[block] = digests.get(block, b"") + sha256(item.digest + b"%d:" % first + bytes(places)).digest()
    return digests


def _places(item: MediaItem, block_size: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (block index, number of the first encoder output, places) for each block with positions of `item`. `places`:
    offsets of the positions within the block, as little-endian 32-bit integers."""
    positions = item.positions.tolist()
    start = 0
    while start < len(positions):
        block, stop = positions[start] // block_size, start
        while stop < len(positions) and positions[stop] // block_size == block:
            stop += 1
        places = b"".join((position - block * block_size).to_bytes(4, "little") for position in positions[start:stop])
        yield block, start, places
        start = stop
