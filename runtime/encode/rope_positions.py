"""Where a prompt's tokens stand for a rotary embedding of three axes (M-RoPE; Qwen2-VL, Wang et al. 2024): time, height and width.

Text stands at one position on all three, each token one further. The tokens of a picture stand on its grid, and what comes behind
it goes on behind the grid's longer side. numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.media import MediaItem

if TYPE_CHECKING:
    from runtime.media import Int32s

_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}


@dataclass(frozen=True, slots=True)
class VisionPositions:
    """`merge_size`: patches of a grid, in height and in width, that are one token. `tokens_per_second`: of a video's time axis,
    whose items say how many seconds a step of their grid takes; None: a position a step. `by_frame`: each frame of a video is a
    grid of its own, with text between them. `behind_time`: what comes behind a grid goes on behind its time, too, where that goes
    further than its sides."""

    merge_size: int
    tokens_per_second: float | None = None
    by_frame: bool = False
    behind_time: bool = False

    def __call__(self, media: Sequence[MediaItem], num_tokens: int) -> Int32s:
        """[3, num_tokens]. Raises ValueError for a grid of another number of tokens than its item has positions."""
        positions = np.empty((3, num_tokens), np.int32)
        done = following = 0  # tokens that are placed, and where the next one stands
        for start, grid, times in self._grids(media):
            text = start - done
            positions[:, done:start] = np.arange(following, following + text)
            following += text
            axes = [times, *(np.arange(size) for size in grid[1:])]
            done = start + int(np.prod(grid))
            positions[:, start:done] = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(3, -1) + following
            furthest = (axes[0][-1] + 1, *grid[1:]) if self.behind_time else grid[1:]
            following += int(max(furthest))
        positions[:, done:] = np.arange(following, following + num_tokens - done)
        return positions

    def _grids(self, media: Sequence[MediaItem]) -> Iterator[tuple[int, tuple[int, int, int], Any]]:
        """Each grid of tokens: where its first one is, its sizes, and where its steps in time are."""
        for item in media:
            if item.modality not in _GRIDS:  # a sound's tokens stand like a text's
                continue
            grid = item.inputs.get(_GRIDS[item.modality])
            if grid is None:
                raise ValueError(
                    f"the {item.modality} has no {_GRIDS[item.modality]}, which says where its tokens stand"
                )
            sizes = grid.reshape(-1).tolist()
            if len(sizes) != 3 or min(sizes) < 1 or any(size % self.merge_size for size in sizes[1:]):
                raise ValueError(f"the {item.modality} has a grid of {sizes}, not (time, height, width)")
            steps, height, width = sizes[0], sizes[1] // self.merge_size, sizes[2] // self.merge_size
            if len(item.positions) != steps * height * width:
                raise ValueError(
                    f"{len(item.positions)} positions for the {steps * height * width} tokens of the {item.modality}'s grid"
                )
            frames = steps if self.by_frame and item.modality == "video" else 1
            for starts in item.positions.reshape(frames, -1):
                if int(starts[-1] - starts[0]) + 1 != len(starts):
                    raise ValueError(f"the {item.modality}'s tokens do not stand side by side")
                yield int(starts[0]), (steps // frames, height, width), self._times(item, steps // frames)

    def _times(self, item: MediaItem, steps: int) -> Any:
        """[steps] int64."""
        if item.modality != "video" or self.tokens_per_second is None:
            return np.arange(steps)
        given = item.inputs.get("second_per_grid_ts", item.inputs.get("video_second_per_grid"))
        seconds = np.float32(1.0 if given is None else given.reshape(-1)[0])
        if self.behind_time:  # rounded as it was when it was trained
            return (np.arange(steps, dtype=np.float32) * seconds * np.float32(self.tokens_per_second)).astype(np.int64)
        return (np.arange(steps) * (self.tokens_per_second * float(seconds))).astype(np.int64)
