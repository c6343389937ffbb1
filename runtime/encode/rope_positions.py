"""M-RoPE positions of a prompt's tokens: time, height and width (Qwen2-VL, Wang et al. 2024).

Text advances by one position on all three axes. Image tokens have positions on their grid. The text after an image continues after
the grid's longer side. Uses numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from runtime.api.media import MediaItem

if TYPE_CHECKING:
    from runtime.api.media import Int32s

_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}


class _Grid(NamedTuple):
    """Grid of a media item. `places`: indices of its tokens in the prompt. `times`: rotary positions of its time steps. `sound`:
    indices of its audio's tokens in the prompt."""

    places: Int32s
    sizes: tuple[int, int, int]
    times: Any
    sound: Int32s | None = None


@dataclass(frozen=True, slots=True)
class VisionPositions:
    """Rules for a model's M-RoPE positions.

    - `merge_size`: number of patches per token, in height and in width
    - `tokens_per_second`: scale of a video's time axis, whose items contain seconds per grid step; None: one position per step
    - `by_frame`: each frame is a grid of its own, with text between frames
    - `behind_time`: text continues after the grid's last time position, if that is larger than its sides
    - `whole_times`: fractional times are rejected
    - `shares_ends`: the two tokens before a video with audio share a position, as do the two tokens after it

    A video's audio may be interleaved with its tokens (Qwen2.5-Omni, 2025) or follow them; both begin at the same position."""

    merge_size: int
    tokens_per_second: float | None = None
    by_frame: bool = False
    behind_time: bool = False
    whole_times: bool = False
    shares_ends: bool = False

    def __call__(self, media: Sequence[MediaItem], num_tokens: int) -> Int32s:
        """Return positions [3, num_tokens]. Raises ValueError if an item's number of tokens in the prompt differs from that of its
        grid."""
        positions = np.empty((3, num_tokens), np.int32)
        done = following = 0  # tokens that have positions, and the next position
        for grid in self._grids(media):
            start, stop = int(grid.places[0]), int(grid.places[-1]) + 1
            text = start - done
            positions[:, done:start] = np.arange(following, following + text)
            following += text
            if grid.sound is not None and self.shares_ends and text > 1:
                following -= 1
                positions[:, start - 1] -= 1
            axes = [grid.times, *(np.arange(size) for size in grid.sizes[1:])]
            positions[:, grid.places] = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(3, -1) + following
            if grid.sound is None:
                furthest = (axes[0][-1] + 1, *grid.sizes[1:]) if self.behind_time else grid.sizes[1:]
                done, following = stop, following + int(max(furthest))
                continue
            positions[:, grid.sound] = np.arange(following, following + len(grid.sound))
            seen, heard = stop, int(grid.sound[-1]) + 1
            done = max(seen, heard)
            following = int(positions[:, min(seen, heard) : done].max()) + 1  # after the one that ends last
            if self.shares_ends and done < num_tokens:
                positions[:, done] = following
                done += 1
        positions[:, done:] = np.arange(following, following + num_tokens - done)
        return positions

    def _grids(self, media: Sequence[MediaItem]) -> Iterator[_Grid]:
        for item, behind in zip_longest(media, media[1:]):
            if item.modality not in _GRIDS:  # audio tokens have positions like text
                continue
            grid = item.inputs.get(_GRIDS[item.modality])
            if grid is None:
                raise ValueError(f"the {item.modality} has no {_GRIDS[item.modality]}, the grid of its tokens")
            sizes = grid.reshape(-1).tolist()
            if len(sizes) != 3 or min(sizes) < 1 or any(size % self.merge_size for size in sizes[1:]):
                raise ValueError(f"the {item.modality} has a grid of {sizes}, not (time, height, width)")
            steps, height, width = sizes[0], sizes[1] // self.merge_size, sizes[2] // self.merge_size
            if len(item.positions) != steps * height * width:
                raise ValueError(
                    f"{len(item.positions)} positions for the {steps * height * width} tokens of the {item.modality}'s grid"
                )
            sound = behind.positions if _is_sound_of(behind, item) else None
            frames = steps if self.by_frame and item.modality == "video" else 1
            for places in item.positions.reshape(frames, -1):
                _check_side_by_side(item.modality, places, sound)
                yield _Grid(places, (steps // frames, height, width), self._times(item, steps // frames), sound)

    def _times(self, item: MediaItem, steps: int) -> Any:
        if item.modality != "video" or self.tokens_per_second is None:
            return np.arange(steps)
        given = item.inputs.get("second_per_grid_ts", item.inputs.get("video_second_per_grid"))
        seconds = np.float32(1.0 if given is None else given.reshape(-1)[0])
        if self.behind_time:  # rounded as in training
            times = np.arange(steps, dtype=np.float32) * seconds * np.float32(self.tokens_per_second)
            if self.whole_times and (times != times.round()).any():
                raise ValueError(
                    f"pairs of frames of {seconds:g} s fall between whole positions: sample the video at two frames a second"
                )
            return times.astype(np.int64)
        return (np.arange(steps, dtype=np.float32) * (np.float32(self.tokens_per_second) * seconds)).astype(np.int64)


def _is_sound_of(behind: MediaItem | None, video: MediaItem) -> TypeGuard[MediaItem]:
    """Return whether item `behind` is the audio of `video`, which is the case if no other token is between them."""
    if behind is None or (video.modality, behind.modality) != ("video", "audio"):
        return False
    return bool(behind.positions[0] <= video.positions[-1] + 1)


def _check_side_by_side(modality: str, places: Int32s, sound: Int32s | None) -> None:
    num, last = len(places), int(places[-1])
    if sound is not None:
        num, last = num + len(sound), max(last, int(sound[-1]))
    if last - int(places[0]) + 1 != num:
        raise ValueError(f"the {modality}'s tokens are not contiguous")
