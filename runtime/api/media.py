"""Media: images, audio and video of a prompt as processed arrays, with their positions.

Independent of files and formats: inputs are decoded and processed before. Standard library only."""

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
    media's bytes and of all processing options; items with the same digest have the same inputs. `positions` [N] int32,
    ascending: prompt positions of the encoder's N outputs, in order; the ids there are the model's placeholder. `inputs`:
    the processor's tensors of this item (pixel_values, image_grid_thw, …), under the names of the model's own processor; or,
    under EMBEDS, the N outputs [N, W] of an encoder that ran elsewhere. They must not be modified."""

    modality: str
    digest: bytes
    positions: Int32s
    inputs: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]


def beside_pictures(media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
    """Return the items. If there are images, audio items get the input BESIDE_PICTURES, for models that encode audio
    differently then."""
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
    """Raise ValueError for media items that the model does not support or that are out of order. The message is for users.

    Items must be of one of `modalities` and sorted by where they begin in a prompt of `num_tokens`. Positions of two items
    may interleave, as those of a video and its audio do, but no position may belong to two items."""
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
    """Return extra input of the prefix-cache hash by block index, besides token ids: item digests, output numbers and
    positions. Blocks without media positions are absent."""
    digests: dict[int, bytes] = {}
    for item in media:
        for block, first, places in _places(item, block_size):
            digests[block] = digests.get(block, b"") + sha256(item.digest + b"%d:" % first + bytes(places)).digest()
    return digests


def _places(item: MediaItem, block_size: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (block, first, places) for each block with positions of `item`: the first output number there, and the offsets
    of the positions in the block as 32-bit integers."""
    positions = item.positions.tolist()
    start = 0
    while start < len(positions):
        block, stop = positions[start] // block_size, start
        while stop < len(positions) and positions[stop] // block_size == block:
            stop += 1
        places = b"".join((position - block * block_size).to_bytes(4, "little") for position in positions[start:stop])
        yield block, start, places
        start = stop
