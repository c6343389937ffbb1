"""Layout of codes in pieces, for matrix instructions that read the weight from registers (pieces.cuh), and kernel instances.

A piece is 32 rows by 128 columns. Each lane's codes are contiguous; the scales of the rows follow the codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ops.gemm import warpgroups
from ops.stored import E2M1, FOUR_BITS, FP4, FP8, NF4, Q4, Q8, TABLES, W4, W8, WeightFormat

SOURCES = [Path(__file__).with_name(name) for name in ("codes.cuh", "pieces.cuh")]
CHUNK = 128  # columns
PIECE_ROWS = 32
GROUPS = (1, 2, 4)  # scales of a row per chunk
FINEST = 8  # for some codes, whose numbers are then multiplied by the scales
_NAMES = {
    W4: "W4Codes", W8: "W8Codes", FP8: "Fp8Codes", E2M1: "E2m1Codes", NF4: "Nf4Codes", FP4: "Fp4Codes", Q4: "Q4Codes",
    Q8: "Q8Codes",
}  # fmt: skip
_BYTES = {codes: CHUNK // 2 if codes in FOUR_BITS else CHUNK for codes in _NAMES}  # bytes of codes per row


@dataclass(frozen=True, slots=True)
class PiecesTile:
    """Kernel instance: a tile of `rows` of x by 64 * `wgs` rows of the weight, with `stages` chunks in flight and `blocks` per
    multiprocessor, for a weight with `groups` groups in a chunk. `scaled`: scales apply to rounded numbers instead of sums."""

    codes: WeightFormat
    rows: int
    wgs: int
    stages: int
    blocks: int
    groups: int
    scaled: bool
    gated: bool

    def name(self, kernel: str) -> str:
        sizes = self.rows, self.wgs, self.stages, self.blocks, self.groups, int(self.scaled), int(self.gated)
        return "_".join(map(str, (kernel, self.codes, *sizes)))

    def source(self, kernel: str) -> str:
        """Return the source line that instantiates the template `kernel`."""
        sizes = self.rows, self.wgs, self.stages, self.groups, int(self.scaled), int(self.gated)
        registers = warpgroups.registers(self.rows, self.wgs, self.blocks)
        words = self.name(kernel), _NAMES[self.codes], *sizes, self.blocks, self.threads, registers
        return f"{kernel.upper()}({', '.join(map(str, words))})"

    @property
    def threads(self) -> int:
        return warpgroups.threads(self.rows, self.wgs)

    @property
    def shared_bytes(self) -> int:
        return self.stages * _stage_bytes(self.codes, self.rows, self.wgs, self.groups) + warpgroups.ALIGNMENT


def tile_of(
    codes: WeightFormat, rows: int, wgs: int, blocks: int, scaled: bool, groups: int, gated: bool, spare_bytes: int = 0
) -> PiecesTile:  # fmt: skip
    """Return a tile with as many stages as fit in shared memory in addition to `spare_bytes` per block."""
    stages = warpgroups.stages(_stage_bytes(codes, rows, wgs, groups), blocks, spare_bytes)
    return PiecesTile(codes, rows, wgs, stages, blocks, groups, scaled, gated)


def _stage_bytes(codes: WeightFormat, rows: int, wgs: int, groups: int) -> int:
    return rows * CHUNK * 2 + 2 * wgs * PIECE_ROWS * (_BYTES[codes] + groups * 4)


def groups_of_chunk(codes: WeightFormat, in_features: int, groups: int) -> int | None:
    """Return a row's number of scales per chunk, for `groups` in all; None if no instance supports it."""
    if groups == 1:
        return 1
    group, rest = divmod(in_features, groups)
    if rest or (group % CHUNK and CHUNK % group):
        return None
    found = max(1, CHUNK // group)
    return found if found in group_counts(codes) else None


def group_counts(codes: WeightFormat) -> tuple[int, ...]:
    """Return the supported numbers of scales of a row per chunk."""
    return (1,) if codes == FP8 else (*GROUPS, FINEST) if codes in (E2M1, Q8) else GROUPS


def fits(codes: WeightFormat, out_features: int, in_features: int, groups: int) -> bool:
    if codes not in _NAMES or groups_of_chunk(codes, in_features, groups) is None:
        return False
    return out_features % 16 == 0 and in_features % 8 == 0


def can_gate(out_features: int) -> bool:
    """Return whether gates and ups are whole pieces."""
    return out_features % (2 * PIECE_ROWS) == 0


def groups_of(codes: WeightFormat, pieces: Tensor) -> int:
    """Return the number of scales of a row per chunk."""
    return (pieces.shape[-1] // PIECE_ROWS - _BYTES[codes]) // 4


def in_pieces(codes: WeightFormat, numbers: Tensor, scales: Tensor) -> Tensor:
    """Pack numbers [N, K] uint8, one code each, and scales [groups, N] of 32 bits into pieces [N / 32, chunks of K, bytes]
    (`fits`).

    The scale of w4 has the zero point in its last 8 bits; those of q4 and q8 are two float16, the zero point in the lower.
    Padding beyond N and K is multiplied by zeros of x.

    4-bit: lane t has 16 of a row's 64 bytes: in word i, the bits from 4 p of half h are column 32 i + 8 p + 2 t + h; for
    table codes, the bits from 4 h of byte p. 8-bit: the same in each half of a chunk, where byte 2 p + h of word i is column
    16 i + 8 p + 2 t + h of that half."""
    (out_features, in_features), num_groups = numbers.shape, scales.shape[0]
    groups = groups_of_chunk(codes, in_features, num_groups)
    assert groups is not None
    chunks = -(-in_features // CHUNK)
    padding = -out_features % PIECE_ROWS
    padded = functional.pad(numbers, (0, chunks * CHUNK - in_features, 0, padding))
    if codes in FOUR_BITS:
        cut = padded.view(-1, PIECE_ROWS, chunks, 4, 4, 4, 2)  # [piece, row, chunk, i, p, t, h]
        # [piece, chunk, row, t, i, h, p], or p and then h: neighbours share a byte.
        order = (0, 2, 1, 5, 3, 4, 6) if codes in (NF4, FP4) else (0, 2, 1, 5, 3, 6, 4)
        nibbles = cut.permute(order)
        packed = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    else:
        cut = padded.view(-1, PIECE_ROWS, chunks, 2, 4, 2, 4, 2)  # [piece, row, chunk, half, i, p, t, h]
        packed = cut.permute(0, 2, 3, 1, 6, 4, 5, 7)  # [piece, chunk, half, row, t, i, p, h]
    packed = packed.reshape(len(cut), chunks, -1)
    first_columns = torch.arange(chunks * groups, device=scales.device) * (CHUNK // groups)
    per_chunk = scales[(first_columns // (in_features // num_groups)).clamp_(max=num_groups - 1)]
    per_chunk = functional.pad(per_chunk, (0, padding))
    of_pieces = per_chunk.view(chunks, groups, -1, PIECE_ROWS).permute(2, 0, 1, 3).contiguous()
    return torch.cat([packed, of_pieces.view(torch.uint8).reshape(len(cut), chunks, -1)], dim=2)


def tables() -> str:
    """Return the C++ types of table codes, for pieces.cuh."""
    return "\n".join(map(_table, (NF4, FP4)))


def _table(codes: WeightFormat) -> str:
    name = _NAMES[codes]
    words = f"""#ifdef FLOAT16
{{{_words(TABLES[codes], torch.float16)}}}
#else
{{{_words(TABLES[codes], torch.bfloat16)}}}
#endif"""
    numbers = f"struct {name}Table {{ static constexpr u32 WORDS[8] =\n{words}\n; }};"
    return f"{numbers}\nusing {name} = TableCodes<{name}Table>;"


def _words(numbers: Sequence[float], dtype: torch.dtype) -> str:
    """Return sixteen numbers as words of their lower bytes, four each, then words of their upper bytes."""
    bytes_of = torch.tensor(numbers).to(dtype).view(torch.uint8).view(16, 2).t().contiguous()
    words = bytes_of.view(torch.int32).flatten().tolist()
    return ", ".join(f"0x{word & 0xFFFFFFFF:08x}u" for word in words)
