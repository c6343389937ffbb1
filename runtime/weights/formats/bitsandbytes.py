"""bitsandbytes of eight bits (LLM.int8, Dettmers et al. 2022), as transformers saves it.

`NAME.weight` [N, K] I8 and `NAME.SCB` [N] F32, the largest number of each row: a code is worth itself * SCB / 127. `weight_format`
says how the codes would lie in memory, and is not used. Columns of large activations, which bitsandbytes computes in 16 bits as
they come, are here like all others. Four bits (nf4, fp4) keep the shape of a matrix in a text of their own, and are not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.weights.dequantize import Bytes
from runtime.weights.formats.codes import W8, Coded, as_floats, in_bytes
from runtime.weights.formats.scheme import Composite, StoredTensor, UnreadScheme
from runtime.weights.rules import Span

_LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8Written(Coded):
    """A scale a row."""

    def rows(self, role: str, span: Span) -> Span | None:
        return span

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        largest = as_floats(raw["scales"].reshape(len(raw["scales"]), -1), "F32")
        return {"weight": raw["weight"], "scales": in_bytes(largest / _LARGEST)}


class BitsAndBytes:
    """See `Scheme`. Raises UnreadScheme."""

    ignored = (".weight_format",)

    def __init__(self, section: Mapping[str, Any]) -> None:
        if not (section.get("load_in_8bit") or section.get("_load_in_8bit")):
            raise UnreadScheme("in four bits")

    def composites(self, stored: Mapping[str, StoredTensor]) -> Iterator[Composite]:
        for name, (dtype, shape) in stored.items():
            scales_name = f"{name.removesuffix('.weight')}.SCB"
            if dtype != "I8" or len(shape) != 2 or not name.endswith(".weight"):
                continue
            if stored.get(scales_name) == StoredTensor("F32", shape[:1]):
                written = Int8Written(W8, shape[1], 1)
                yield Composite(name, shape, {"weight": name, "scales": scales_name}, written)


SCHEMES = {"bitsandbytes": BitsAndBytes}
