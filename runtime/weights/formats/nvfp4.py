"""Scheme of NVFP4: numbers of four bits (E2M1), an E4M3 scale for each 16 numbers of a row, and a float32 scale for the weight.

modelopt has `NAME.weight` [N, K / 2] U8, two adjacent numbers per byte, the first in the lower half; `weight_scale` [N, K / 16]
F8_E4M3; and `weight_scale_2`, which multiplies the other scales. compressed-tensors has `weight_packed`, `weight_scale` and
`weight_global_scale`, which divides the other scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from runtime.weights.dequantize import Bytes
from runtime.weights.formats.codes import E2M1, Coded, in_bytes
from runtime.weights.formats.fp8 import ACTIVATIONS, Fp8
from runtime.weights.formats.scheme import Composite, Scheme, StoredTensor, UnreadScheme
from runtime.weights.rules import Span

_GROUP = 16


@dataclass(frozen=True, slots=True)
class Nvfp4Written(Coded):
    """NVFP4 weight. `divides`: the weight's float32 scale divides instead of multiplying."""

    divides: bool

    def rows(self, role: str, span: Span) -> Span | None:
        return None if role == "super_scales" else span

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        of_all = raw["super_scales"].reshape(-1).view(np.float32)
        of_all = np.float32(1) / of_all if self.divides else of_all
        return {
            "weight": raw["weight"],
            "scales": raw["scales"],
            "super_scales": in_bytes(of_all.reshape(1, 1).repeat(len(raw["weight"]), 0)),
        }


class Nvfp4:
    """Scheme of NVFP4 in modelopt's layout."""

    ignored = ACTIVATIONS

    def composites(self, stored: Mapping[str, StoredTensor]) -> Iterator[Composite]:
        for name in stored:
            yield from _found(stored, name, name, f"{name}_scale_2", divides=False)


def of_compressed_tensors(stored: Mapping[str, StoredTensor]) -> Iterator[Composite]:
    for packed in stored:
        if packed.endswith(".weight_packed"):
            name = packed.removesuffix("_packed")
            yield from _found(stored, name, packed, f"{name}_global_scale", divides=True)


def _found(
    stored: Mapping[str, StoredTensor], name: str, packed: str, of_all: str, *, divides: bool
) -> Iterator[Composite]:  # fmt: skip
    (dtype, shape), scales, one = stored[packed], stored.get(f"{name}_scale"), stored.get(of_all)
    if dtype != "U8" or len(shape) != 2 or scales is None or one is None:
        return
    num_rows, num_columns = shape[0], shape[1] * 2
    groups = num_columns // _GROUP
    if scales == StoredTensor("F8_E4M3", (num_rows, groups)) and (one.dtype, prod(one.shape)) == ("F32", 1):
        tensors = {"weight": packed, "scales": f"{name}_scale", "super_scales": of_all}
        yield Composite(name, (num_rows, num_columns), tensors, Nvfp4Written(E2M1, num_columns, groups, divides))


# NVIDIA's modelopt with the algorithms FP8, FP8_PER_CHANNEL_PER_TOKEN (fp8.py) and NVFP4 (nvfp4.py). Activations
# stay in 16 bits here.
def modelopt(section: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a modelopt config, NVFP4 or FP8. Raises UnreadScheme for other algorithms."""
    algorithm = section.get("quant_algo", "FP8")
    if algorithm == "NVFP4":
        return Nvfp4()
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise UnreadScheme(f"by the algorithm {algorithm}")
    return Fp8(section)


SCHEMES = {"modelopt": modelopt}
