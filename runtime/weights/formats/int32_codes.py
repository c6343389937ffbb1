"""Codes of four or eight bits in words of 32, lowest first: as GPTQ and compressed-tensors have them; AWQ's words are in an order
of their own."""

from __future__ import annotations

import numpy as np

from runtime.weights.dequantize import Bytes
from runtime.weights.formats.codes import W4, nibbles, paired

AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where in a word the code of each of eight neighbours is


def along_rows(raw: Bytes, bits: int) -> Bytes:
    """Rows of words, whose codes are neighbours of a row, [rows, bytes] -> codes [rows, columns]."""
    return nibbles(raw) if bits == 4 else raw


def along_columns(raw: Bytes, bits: int) -> Bytes:
    """Words whose codes stand one below the other, [rows / codes of a word, 4 * columns] -> codes [columns, rows]."""
    words = raw.reshape(len(raw), -1, 4).swapaxes(0, 1)  # [columns, words, bytes]
    return along_rows(np.ascontiguousarray(words).reshape(len(words), -1), bits)


def of_awq(raw: Bytes) -> Bytes:
    """[rows, bytes] -> codes [rows, columns]."""
    return nibbles(raw).reshape(len(raw), -1, 8)[:, :, AWQ_ORDER].reshape(len(raw), -1)


def as_weight(codes: Bytes, kind: str) -> Bytes:
    """Codes without sign [rows, columns] -> the bytes of a weight in this format."""
    return paired(codes) if kind == W4 else np.bitwise_xor(codes, 0x80, dtype=np.uint8)
