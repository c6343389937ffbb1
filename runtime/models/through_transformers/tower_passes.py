"""Forward passes of a vision encoder that depend only on an image's pixels and size, so that they can be captured as CUDA graphs.

The later conversion of patches to outputs is not captured, because it may read sizes from the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.models.model import EncoderPasses
from runtime.models.through_transformers.vision_blocks import Block

_PATCHES_PER_OUTPUT = 4  # for most encoders that merge patches: bounds of outputs then hold for others too

_Layout: TypeAlias = Mapping[str, Any]  # by name: a shape, or a tuple of shapes and None


class TowerPasses:
    """Replacement of `tower.forward`. `passes`: returns the current executor of passes, or None."""

    def __init__(self, tower: Any, passes: Callable[[], EncoderPasses | None]) -> None:
        self._forward, self._passes = tower.forward, passes
        size = tower.config.patch_size
        self._patches_of_output = _PATCHES_PER_OUTPUT * (size**2 if isinstance(size, int) else prod(size))
        self._layouts: dict[bytes, tuple[type[Any], _Layout]] = {}

    def __call__(self, pixel_values: Tensor, **rest: Any) -> Any:
        """Compute pixel_values [B, 3, S, S]. Calls with further tensors on the device run without graphs."""
        passes = self._passes()
        if passes is None or any(isinstance(each, Tensor) and each.device.type != "cpu" for each in rest.values()):
            return self._forward(pixel_values, **rest)
        key = repr((pixel_values.shape, sorted(rest.items()))).encode()

        def compute(inputs: Mapping[str, Tensor]) -> Tensor:
            found = self._forward(inputs["pixel_values"], **rest)
            tensors: list[Tensor] = []
            self._layouts[key] = type(found), {name: _laid(each, tensors) for name, each in found.items()}
            return torch.cat([each.flatten() for each in tensors])

        num_outputs = pixel_values[:, 0].numel() // self._patches_of_output
        flat = passes.run(key, num_outputs, {"pixel_values": pixel_values}, compute)
        kind, layout = self._layouts[key]
        first = 0

        def read(shape: Any) -> Any:
            nonlocal first
            if shape is None:
                return None
            if not isinstance(shape, torch.Size):
                return tuple(map(read, shape))
            begin, first = first, first + shape.numel()
            return flat[begin:first].view(shape)

        return kind(**{name: read(shape) for name, shape in layout.items()})


def _laid(found: Any, tensors: list[Tensor]) -> Any:
    """Append all tensors in the nested `found` to `tensors`, and return their shapes in the same structure."""
    if isinstance(found, Tensor):
        tensors.append(found)
        return found.shape
    return None if found is None else tuple(_laid(each, tensors) for each in found)


def run_by(passes: Callable[[], EncoderPasses | None], model: nn.Module) -> None:
    """Run the vision encoders of `model` that use our blocks through the executor that `passes` returns. Encoders that read a
    padding mask inside are not changed."""
    for each in model.modules():
        takes = inspect.signature(each.forward).parameters if isinstance(each, PreTrainedModel) else {}
        if "pixel_values" not in takes or "patch_attention_mask" in takes or "input_ids" in takes:
            continue
        inner = [other for other in each.modules() if other is not each and isinstance(other, PreTrainedModel)]
        if not inner and any(isinstance(other, Block) for other in each.modules()):
            each.forward = TowerPasses(each, passes)
