"""Inputs of a vision encoder that depend only on the images' sizes: positions of patches, and which patches attend to each other.

transformers' own functions compute them on the host, once for equal sizes. The encoder would otherwise read the sizes from the
device in the middle of a pass, which a captured graph cannot do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import vision_utils

_MOST = 32  # cached grids


class Grids:
    """Cache of size-dependent inputs for transformers' vision encoder `tower`."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower
        self._known: OrderedDict[bytes, Mapping[str, Any]] = OrderedDict()
        # Some encoders also read the grids themselves.
        self.on_device = hasattr(tower, "embeddings")

    def of(self, grids: Tensor, device: str) -> Mapping[str, Any]:
        """Return the size-dependent inputs of a pass, by transformers' argument names. grids [N, 3] on the host: frames, rows and
        columns of patches of each item."""
        key = grids.numpy().tobytes()
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = {
                name: each.to(device) if isinstance(each, Tensor) else each for name, each in self._made(grids).items()
            }
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return found

    def num_outputs(self, grids: Tensor) -> int:
        merge_size: int = self._tower.spatial_merge_size
        return int(grids.prod(1).sum()) // merge_size**2

    def _made(self, grids: Tensor) -> dict[str, Any]:
        tower = self._tower
        starts = vision_utils.get_vision_cu_seqlens(grids)
        made = {
            "position_ids": vision_utils.get_vision_position_ids(grids, tower.spatial_merge_size),
            "cu_seqlens": starts,
            "max_seqlen": int(starts.diff().max()),
        }
        if hasattr(tower, "window_size"):
            index, windows = vision_utils.get_vision_window_index(
                grids,
                spatial_merge_size=tower.spatial_merge_size,
                window_size=tower.window_size,
                patch_size=tower.patch_size,
            )
            made |= {
                "window_index": index,
                "cu_window_seqlens": windows,
                "max_window_seqlen": int(windows.diff().max()),
            }
        if hasattr(tower, "num_grid_per_side"):
            places, shares = vision_utils.get_vision_interpolation_indices_and_weights(
                grids,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=tower.config.spatial_merge_size,
            )
            made |= {"interp_indices": places, "interp_weights": shares}
        return made
