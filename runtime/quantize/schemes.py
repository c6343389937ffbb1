"""Quantisation schemes: the representable numbers, the choice of scales, and the tensors and config section in compressed-tensors
format.

Weights are symmetric: a code times a scale. There is a scale for each row (fp8, w8a8) or for each group of columns of a row
(w4a16). With 8-bit weights a server also quantises activations, each token by its own largest value. This needs nothing in the
files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

GROUPS = (128, 64, 32)  # columns that share a scale: the largest of these that divides a matrix
_SHRINK = tuple(
    1 - step / 25 for step in range(11)
)  # candidates for the largest representable value, as shares of the largest number

_IN_CACHE = 1 << 17  # numbers per piece that stays in the cache


class RoundingScheme(ABC):
    """Quantisation scheme. `scales` and `codes` read rows [N, K] float32 of a matrix and some of its columns. `codes` returns
    float32."""

    name: ClassVar[str]
    format: ClassVar[str]
    dynamic: ClassVar[bool] = True  # activations are quantised too

    @abstractmethod
    def group(self, num_columns: int) -> int | None:
        """Return the number of columns that share a scale, or None if no kernel supports the matrix."""

    @abstractmethod
    def scales(self, weight: Tensor, importance: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return scales [N, K / group] of weight [N, K]; `dtype` can represent them. importance [K]: weight of each column's
        error."""

    @abstractmethod
    def codes(self, scaled: Tensor) -> Tensor:
        """Round values, which are divided by their scales, to the nearest codes."""

    @abstractmethod
    def tensors(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors that the file stores for a matrix, by name suffix. Scales are stored in `dtype`."""

    @abstractmethod
    def section(self, group: int) -> dict[str, Any]:
        """Return the description of the weights in compressed-tensors' config section. `group`: number of columns that share a
        scale."""

    def rounded(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Return the codes [N, K] of a whole weight [N, K]."""
        return self.codes(weight / spread(scales, weight.shape[1]))


def spread(scales: Tensor, num_columns: int) -> Tensor:
    """Repeat scales [N, groups] to [N, columns]."""
    return scales.repeat_interleave(num_columns // scales.shape[1], dim=1)


def _safe(scales: Tensor, dtype: torch.dtype) -> Tensor:
    kept = scales.to(dtype).float()
    return kept.where((kept > 0) & kept.isfinite(), 1.0)


@dataclass(frozen=True, slots=True)
class W4A16(RoundingScheme):
    """Scheme with 4-bit codes from -8 to 7, a scale for each group of columns, and unquantised activations."""

    name = "w4a16"
    format = "pack-quantized"
    dynamic = False

    def group(self, num_columns: int) -> int | None:
        return next((size for size in GROUPS if num_columns % size == 0), None)

    def scales(self, weight: Tensor, importance: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return for each group the scale with the least squared error among several candidates. The largest number may be
        clipped."""
        group = self.group(weight.shape[1])
        assert group is not None, "such a matrix is not quantised"
        rows = max(1, _IN_CACHE // weight.shape[1])
        parts = (weight[begin : begin + rows] for begin in range(0, len(weight), rows))
        return torch.cat([self._best(some, group, importance, dtype) for some in parts])

    def _best(self, weight: Tensor, group: int, importance: Tensor | None, dtype: torch.dtype) -> Tensor:
        grouped = weight.reshape(len(weight), -1, group)
        weights = None if importance is None else importance.view(1, -1, group)
        largest = grouped.abs().amax(2) / 7.5
        best, least = _safe(largest, dtype), torch.full_like(largest, torch.inf)
        for shrink in _SHRINK:
            scales = _safe(largest * shrink, dtype)
            each = scales[:, :, None]
            lost = self.codes(grouped / each).mul_(each).sub_(grouped).square_()
            total = (lost if weights is None else lost.mul_(weights)).sum(2)
            better = total < least
            best, least = torch.where(better, scales, best), torch.where(better, total, least)
        return best

    def codes(self, scaled: Tensor) -> Tensor:
        return scaled.round().clamp_(-8, 7)

    def tensors(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors that the file stores. A word has eight codes, each plus 8, the first one in the lowest bits."""
        places = (codes + 8).to(torch.int64).reshape(len(codes), -1, 8) << torch.arange(0, 32, 4)
        words = places.sum(2)
        return {
            "weight_packed": torch.where(words >= 2**31, words - 2**32, words).to(torch.int32),
            "weight_scale": scales.to(dtype),
            "weight_shape": torch.tensor(codes.shape),
        }

    def section(self, group: int) -> dict[str, Any]:
        return _weights(4, "int", strategy="group", group_size=group)


class _ByRow(RoundingScheme):
    """Base of schemes with a scale for each row, which maps the row's largest value to the largest code."""

    __slots__ = ()
    largest: ClassVar[float]
    kind: ClassVar[str]

    def group(self, num_columns: int) -> int | None:
        return num_columns

    def scales(self, weight: Tensor, importance: Tensor | None, dtype: torch.dtype) -> Tensor:
        return _safe(weight.abs().amax(1, keepdim=True) / self.largest, dtype)

    def section(self, group: int) -> dict[str, Any]:
        return _weights(8, self.kind, strategy="channel")


class Fp8Rounding(_ByRow):
    """Scheme with 8-bit floats (E4M3: three bits of mantissa, at most 448)."""

    __slots__ = ()
    name = "fp8"
    format = "float-quantized"
    largest = 448.0
    kind = "float"

    def codes(self, scaled: Tensor) -> Tensor:
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float()

    def tensors(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scales.to(dtype)}


class W8A8(_ByRow):
    """Scheme with 8-bit integers from -127 to 127."""

    __slots__ = ()
    name = "w8a8"
    format = "int-quantized"
    largest = 127.0
    kind = "int"

    def codes(self, scaled: Tensor) -> Tensor:
        return scaled.round().clamp_(-127, 127)

    def tensors(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"weight": codes.to(torch.int8), "weight_scale": scales.to(dtype)}


def _weights(bits: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, "observer": "minmax"} | more


SCHEMES: dict[str, RoundingScheme] = {each.name: each for each in (W4A16(), Fp8Rounding(), W8A8())}


def quantization_config(scheme: RoundingScheme, groups: dict[int, list[str]], ignored: list[str]) -> dict[str, Any]:
    """Return the config's section `quantization_config`. `groups`: layer names by group size. `ignored`: layers that are not
    quantised. If all quantised layers have the same group size, the section names their class, because some readers require
    that."""
    activations = None
    if scheme.dynamic:
        kind = "float" if scheme.name == "fp8" else "int"
        activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    named: list[tuple[dict[str, Any], list[str]]] = []
    for group, names in sorted(groups.items()):
        section = scheme.section(group)
        if named and named[-1][0] == section:  # one scale per row, of any length
            named[-1][1].extend(names)
        else:
            named.append((section, [*names]))
    sections = {
        f"group_{number}": {
            "targets": ["Linear"] if len(named) == 1 else sorted(names),
            "weights": section,
            "input_activations": activations,
            "output_activations": None,
            "format": scheme.format,
        }
        for number, (section, names) in enumerate(named)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": sections,
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }
