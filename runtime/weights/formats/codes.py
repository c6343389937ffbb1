"""Quantised codes and scales in the kernels' layout, as numpy arrays of bytes by role.

Roles and formats are those of `ops.stored`. Here each role is [rows, bytes], except "order", which is [1, columns] int32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.weights.dequantize import FORMATS, TABLES, Bytes, Floats, dequantize
from runtime.weights.rules import Span, WeightsError

FP8, W8, W4 = "fp8", "w8", "w4"
NF4, FP4, E2M1, Q4, Q8 = "nf4", "fp4", "e2m1", "q4", "q8"
E8M0 = "F8_E8M0"  # a scale of one byte: an exponent; 255 is NaN (Microscaling Formats 1.0)
FOUR_BITS = frozenset({W4, Q4, *TABLES})
MIN_GROUP = 32  # columns: kernels need groups of multiples of it
_WIDTH, _MIN_DECODED = 64, 16  # for q4 and table codes, groups may also be divisors or multiples of the width


def _e4m3() -> Floats:
    """Return the value of each E4M3 byte [256]: a sign, four exponent bits, three mantissa bits. There are no infinities, and two
    NaNs."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    worth = np.where(exponent > 0, np.exp2(exponent - 7.0) * (1 + mantissa / 8), np.exp2(-6.0) * mantissa / 8)
    worth[bits & 127 == 127] = np.nan
    signed: Floats = np.where(bits < 128, worth, -worth).astype(np.float32)
    return signed


_WORTH = _e4m3()


def kept_as(codes: str, num_columns: int, groups: int) -> str:
    """Return the format name of a weight with `groups` groups per row. If no kernel supports the group size, the name contains that
    size."""
    group, rest = divmod(num_columns, groups)
    if codes in TABLES or codes in (Q4, Q8):
        whole = group >= _MIN_DECODED and (group % _WIDTH == 0 or _WIDTH % group == 0)
        return codes if not rest and (groups == 1 or whole) else f"{codes} in groups of {group}"
    return codes if not rest and (groups == 1 or group % MIN_GROUP == 0) else f"{codes} in groups of {group}"


def as_floats(raw: Bytes, dtype: str) -> Floats:
    """Convert rows of bytes of "F32", "F16", "BF16" or "F8_E8M0" (powers of two) to floats [rows, numbers]."""
    if dtype == E8M0:
        return np.where(raw == 255, np.float32(np.nan), np.ldexp(np.float32(1), raw.astype(np.int32) - 127))
    written = FORMATS[dtype]
    out = np.empty((len(raw), raw.shape[1] // written.size), np.float32)
    dequantize(np.ascontiguousarray(raw), written, out)
    return out


def in_bytes(array: npt.NDArray[Any]) -> Bytes:
    """View an array [rows, numbers] as [rows, bytes] uint8."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)


def nibbles(raw: Bytes) -> Bytes:
    """Unpack [rows, bytes] to two codes per byte, the lower half first."""
    out = np.empty((len(raw), raw.shape[1], 2), np.uint8)
    np.bitwise_and(raw, 15, out=out[:, :, 0])
    np.right_shift(raw, 4, out=out[:, :, 1])
    return out.reshape(len(raw), -1)


def paired(codes: Bytes) -> Bytes:
    """Pack codes [rows, columns] two to a byte, the first in the lower half: the inverse of `nibbles`."""
    pairs: Bytes = np.left_shift(codes[:, 1::2], 4, dtype=np.uint8)
    pairs |= codes[:, 0::2]
    return pairs


def in_groups(g_idx: npt.NDArray[np.int32], groups: int) -> npt.NDArray[np.int32] | None:
    """Return the order [columns] that sorts columns by their group `g_idx`; None if they are sorted. Raises WeightsError for
    unequal groups."""
    if not np.array_equal(np.bincount(g_idx, minlength=groups), np.full(groups, len(g_idx) // groups)):
        raise WeightsError("columns are in groups of several sizes")
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    return None if np.array_equal(order, np.arange(len(order))) else order


@dataclass(frozen=True, slots=True)
class Coded:
    """Base of weights that consist of codes and scales. `codes`: format of the codes, "fp8", "w8" or "w4"."""

    codes: str
    num_columns: int
    groups: int

    @property
    def format(self) -> str:
        return kept_as(self.codes, self.num_columns, self.groups)

    @property
    def whole(self) -> bool:
        return False

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        raise NotImplementedError

    def columns(self, arrays: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        if "order" in arrays:
            raise WeightsError("reordered columns (g_idx) cannot be sharded")
        group = self.num_columns // self.groups
        if self.groups > 1 and (span.start % group or span.stop % group):
            raise WeightsError(f"columns {span.start} to {span.stop} are not whole groups of {group}")
        halves = 2 if self.codes in FOUR_BITS else 1
        cut = {"weight": arrays["weight"][:, span.start // halves : span.stop // halves]}
        for role in {"scales", "zeros", "mins"} & arrays.keys():
            size = arrays[role].shape[1] // self.groups
            first, last = (0, 1) if self.groups == 1 else (span.start // group, span.stop // group)
            cut[role] = arrays[role][:, first * size : last * size]
        if "super_scales" in arrays:
            cut["super_scales"] = arrays["super_scales"]
        return {role: np.ascontiguousarray(each) for role, each in cut.items()}

    def decode(self, raw: Mapping[str, Bytes], out: Floats, first_row: int) -> None:
        arrays = self.stored_form(raw, Span(first_row, first_row + len(out)))
        values = worth(self.codes, arrays["weight"])
        if "super_scales" in arrays:
            scales = _WORTH[arrays["scales"]] * arrays["super_scales"].view(np.float32)
        else:
            scales = arrays["scales"].view(np.float32)
        grouped = values.reshape(len(out), self.groups, -1)
        if self.codes == W4:
            grouped -= arrays["zeros"][:, :, None] if "zeros" in arrays else np.float32(8)
        grouped *= scales[:, :, None]
        if "mins" in arrays:
            grouped -= arrays["mins"].view(np.float32)[:, :, None]
        order = arrays["order"].view(np.int32)[0] if "order" in arrays else slice(None)
        out[:, order] = grouped.reshape(len(out), -1)


@dataclass(frozen=True, slots=True)
class TransposedCodes(Coded):
    """Base of weights that are stored transposed. Their rows are not contiguous in the file, so a weight is read completely."""

    @property
    def whole(self) -> bool:
        return True

    def rows(self, role: str, span: Span) -> Span | None:
        return None


def worth(codes: str, weight: Bytes) -> Floats:
    """Return the values [rows, columns] float32 of codes, before scales and zero points are applied."""
    if codes == FP8:
        return _WORTH[weight]
    if codes in TABLES:
        return TABLES[codes][nibbles(weight)]
    return (nibbles(weight) if codes in FOUR_BITS else weight.view(np.int8)).astype(np.float32)


# Codes of four or eight bits in words of 32, lowest first, as in GPTQ and compressed-tensors. AWQ's words have
# their own order.
AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # position in a word of each of eight adjacent codes


def along_rows(raw: Bytes, bits: int) -> Bytes:
    """Unpack [rows, bytes] of words to codes [rows, columns]. A word has adjacent codes of a row."""
    return nibbles(raw) if bits == 4 else raw


def along_columns(raw: Bytes, bits: int) -> Bytes:
    """Unpack words [rows / codes per word, 4 * columns] to codes [columns, rows]. A word has adjacent codes of a column."""
    words = raw.reshape(len(raw), -1, 4).swapaxes(0, 1)  # [columns, words, bytes]
    return along_rows(np.ascontiguousarray(words).reshape(len(words), -1), bits)


def of_awq(raw: Bytes) -> Bytes:
    """Unpack AWQ's words [rows, bytes] to codes [rows, columns]."""
    return nibbles(raw).reshape(len(raw), -1, 8)[:, :, AWQ_ORDER].reshape(len(raw), -1)


def as_weight(codes: Bytes, kind: str) -> Bytes:
    """Pack unsigned codes [rows, columns] to a weight's bytes in the format `kind`."""
    return paired(codes) if kind == W4 else np.bitwise_xor(codes, 0x80, dtype=np.uint8)
