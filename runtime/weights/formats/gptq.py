"""Scheme of GPTQ (Frantar et al. 2023): transposed codes of four or eight bits, in groups of input columns in any order.

`NAME.qweight` [K / codes per word, N] I32. `qzeros` [groups, N / codes per word] I32: zero points, stored minus one unless the
config's `checkpoint_format` is gptq_v2. `scales` [groups, N]. `g_idx` [K] I32: group of each column, unordered if the config's
`desc_act` is true."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.weights.dequantize import Bytes
from runtime.weights.formats.codes import (
    W4,
    W8,
    TransposedCodes,
    along_columns,
    along_rows,
    as_floats,
    as_weight,
    in_bytes,
    in_groups,
)
from runtime.weights.formats.scheme import Composite, StoredTensor, UnreadScheme
from runtime.weights.rules import Span


@dataclass(frozen=True, slots=True)
class GptqWritten(TransposedCodes):
    """GPTQ weight. `symmetric`: all zero points are half of the code range. `less_one`: zero points are stored minus one. `dtype`:
    dtype of scales."""

    symmetric: bool
    less_one: bool
    dtype: str

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        bits = 4 if self.codes == W4 else 8
        taken = slice(*span)
        codes = along_columns(
            raw["weight"].reshape(len(raw["weight"]), -1, 4)[:, taken].reshape(len(raw["weight"]), -1), bits
        )
        scales = as_floats(raw["scales"], self.dtype)[:, taken].T
        found: dict[str, Bytes] = {}
        order = None if "order" not in raw else in_groups(raw["order"].view(np.int32).reshape(-1), self.groups)
        if order is not None:
            codes = codes[:, order]
            found["order"] = in_bytes(order[None])
        if not self.symmetric:
            zeros = along_rows(raw["zeros"], bits)[:, taken].T
            found["zeros"] = np.ascontiguousarray((zeros + 1) & 15 if self.less_one else zeros)
        return found | {"weight": as_weight(codes, self.codes), "scales": in_bytes(scales)}


class Gptq:
    """Scheme of GPTQ. Raises UnreadScheme."""

    ignored = (".qzeros", ".g_idx")

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._bits, self._symmetric = int(section.get("bits") or 0), bool(section.get("sym", True))
        self._less_one = section.get("checkpoint_format", "gptq") != "gptq_v2"
        if self._bits not in (4, 8):
            raise UnreadScheme(f"in {self._bits} bits")
        if self._bits == 8 and not self._symmetric:
            raise UnreadScheme("in 8 bits with zero points (sym: false)")
        if section.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
            raise UnreadScheme(f"in the layout {section['checkpoint_format']}")
        if section.get("dynamic"):
            raise UnreadScheme("with settings by layer (dynamic)")

    def composites(self, stored: Mapping[str, StoredTensor]) -> Iterator[Composite]:
        per_word = 32 // self._bits
        for name, (dtype, shape) in stored.items():
            base = name.removesuffix(".qweight")
            scales, zeros = stored.get(f"{base}.scales"), stored.get(f"{base}.qzeros")
            if base == name or dtype != "I32" or len(shape) != 2 or scales is None or zeros is None:
                continue
            num_rows, num_columns = shape[1], shape[0] * per_word
            groups = scales.shape[0]
            if (
                scales.shape != (groups, num_rows)
                or zeros.shape != (groups, num_rows // per_word)
                or num_columns % groups
            ):
                continue
            tensors = {"weight": name, "scales": f"{base}.scales"}
            if not self._symmetric:
                tensors["zeros"] = f"{base}.qzeros"
            if f"{base}.g_idx" in stored and groups > 1:
                tensors["order"] = f"{base}.g_idx"
            written = GptqWritten(
                W4 if self._bits == 4 else W8, num_columns, groups, self._symmetric, self._less_one, scales.dtype
            )
            yield Composite(f"{base}.weight", (num_rows, num_columns), tensors, written)


SCHEMES = {"gptq": Gptq}
