"""Scheme of AWQ (Lin et al. 2024) in its `gemm` layout: transposed 4-bit codes, eight output rows per word.

`NAME.qweight` [K, N / 8] I32, `qzeros` [groups, N / 8] I32, `scales` [groups, N]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.weights.dequantize import Bytes
from runtime.weights.formats.codes import W4, TransposedCodes, as_floats, as_weight, in_bytes, of_awq
from runtime.weights.formats.scheme import Composite, StoredTensor, UnreadScheme
from runtime.weights.rules import Span

_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class AwqWritten(TransposedCodes):
    """AWQ weight. `dtype`: dtype of scales."""

    dtype: str

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        taken = slice(*span)
        return {
            "weight": as_weight(np.ascontiguousarray(of_awq(raw["weight"])[:, taken].T), W4),
            "scales": in_bytes(as_floats(raw["scales"], self.dtype)[:, taken].T),
            "zeros": np.ascontiguousarray(of_awq(raw["zeros"])[:, taken].T),
        }


class Awq:
    """Scheme of AWQ. Raises UnreadScheme."""

    ignored = ()

    def __init__(self, section: Mapping[str, Any]) -> None:
        bits, version = section.get("bits", section.get("w_bit")), str(section.get("version", "gemm")).lower()
        if bits != 4:
            raise UnreadScheme(f"in {bits} bits")
        if version != "gemm":
            raise UnreadScheme(f"in the layout {version}")
        if not section.get("zero_point", True):
            raise UnreadScheme("without zero points")

    def composites(self, stored: Mapping[str, StoredTensor]) -> Iterator[Composite]:
        for name, (dtype, shape) in stored.items():
            base = name.removesuffix(".qweight")
            scales, zeros = stored.get(f"{base}.scales"), stored.get(f"{base}.qzeros")
            if base == name or dtype != "I32" or len(shape) != 2 or scales is None or zeros is None:
                continue
            num_columns, num_rows = shape[0], shape[1] * _PER_WORD
            groups = scales.shape[0]
            if scales.shape == (groups, num_rows) and zeros.shape == (groups, shape[1]) and num_columns % groups == 0:
                tensors = {"weight": name, "scales": f"{base}.scales", "zeros": f"{base}.qzeros"}
                written = AwqWritten(W4, num_columns, groups, scales.dtype)
                yield Composite(f"{base}.weight", (num_rows, num_columns), tensors, written)


SCHEMES = {"awq": Awq}
