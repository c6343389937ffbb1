"""Mixture of experts on weights in codes that are decoded before they are multiplied (`ops.stored.DECODED`), and on ggml's blocks,
which become such codes: the grouped products of triton_grouped.py, of numbers that gemm/triton_decoded.py makes in registers; of
four bits on Hopper those of experts_coded.cu, where it has them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.cuda.program import missing_for_hopper
from ops.gemm import pieces
from ops.gemm.decoded import groups_of, in_features_of, in_pieces, kind_of, laid, tiles_fit
from ops.gemm.triton_decoded import Codes, decoded
from ops.gemm.weight import check_refill, overwrite
from ops.launch import overlap, wait_for_previous
from ops.moe import experts_coded
from ops.moe.coded_experts import CodedGroupedExpertWeights
from ops.moe.triton_grouped import Added, find, rows_of, write
from ops.moe.triton_route import Routed
from ops.moe.weights import ExpertShape, Half
from ops.stored import StoredWeight, WeightFormat, formats_of
from ops.tuning.numbers import ProductTiles

# The tiles are those of 16-bit weights; codes on their way to numbers take registers and shared memory beside theirs.
_MAX_COLUMNS, _MAX_STAGES = 64, 3


class _Kept(NamedTuple):
    """Of all experts, by role as of `laid`, or "pieces" alone (gemm/pieces.py), each [experts, ...]; and the format that they came
    in. `codes`: as Triton's kernel takes them."""

    written: WeightFormat
    kind: WeightFormat
    groups: int
    codes: Codes | None
    roles: dict[str, Tensor]


class DecodedExpertWeights(CodedGroupedExpertWeights):
    """All experts of a half are written as the first that is filled in."""

    _weights: dict[Half, _Kept]

    def _fill_weight(self, half: Half, expert: int, parts: tuple[StoredWeight, ...]) -> None:
        formats, current = formats_of(parts), self._weights.get(half)
        if len(formats) != 1 or (current is not None and formats[0] != current.written):
            kept = "codes of one kind" if current is None else str(current.written)
            raise ValueError(f"experts in {' and '.join(map(str, formats))} where {kept} are kept")
        sizes = sum(len(part.weight) for part in parts), in_features_of(parts[0])
        check_refill("weight", sizes, self.shape.matrix(half))
        groups = groups_of(parts[0])
        if current is not None and (groups != current.groups or len(set(map(groups_of, parts))) > 1):
            raise ValueError(f"an expert in {groups} groups of columns where {current.groups} are kept")
        tiled = self._is_tiled(half, parts) if current is None else current.codes is None
        given = {"pieces": in_pieces(parts)} if tiled else laid(parts)
        if current is None:
            current = self._weights[half] = self._kept(parts[0], given)
            self.nbytes += sum(each.nbytes for each in current.roles.values())
            self.written = tuple(
                (name, str(kept.written), kept.groups, *kept.roles) for name, kept in self._weights.items()
            )
        if given.keys() != current.roles.keys():
            raise ValueError(f"an expert with {', '.join(given)} where {', '.join(current.roles)} are kept")
        for role, room in current.roles.items():
            overwrite(room[expert], given[role], role)

    def _kept(self, part: StoredWeight, given: dict[str, Tensor]) -> _Kept:
        roles = {role: self._room(each) for role, each in given.items()}
        kind, codes = kind_of(part), None
        if "pieces" not in roles:
            rest = (roles.get(role) for role in ("super_scales", "mins", "super_mins"))
            codes = Codes(kind, in_features_of(part), roles["weight"], roles["scales"], *rest)
        return _Kept(part.format, kind, groups_of(part), codes, roles)

    def _is_tiled(self, half: Half, parts: tuple[StoredWeight, ...]) -> bool:
        if self._dtype == torch.float32 or missing_for_hopper() is not None or not tiles_fit(parts):
            return False
        return experts_coded.fits(kind_of(parts[0]), self.shape, groups_of(parts[0]), half)

    def product(self, half: Half, x: Tensor, routed: Routed, tiles: ProductTiles, added: Added | None) -> Tensor:
        assert added is None, "adapters do not change experts in codes"
        kept, bias = self._weights[half], self._biases.get(half)
        if kept.codes is not None:
            return _launch(self.shape, half, kept.codes, bias, x, routed, tiles)
        weight = kept.roles["pieces"]
        groups, clamped = pieces.groups_of(kept.kind, weight), not isinstance(self.shape.activation, str)
        experts_coded.compile_ahead(kept.kind, groups, x.dtype, x.device, clamped=clamped)
        return experts_coded.experts_coded(kept.kind, self.shape, half, weight, bias, x, routed)


@triton.jit
def _x_columns(x_at, begin, IN: tl.constexpr):
    column = begin + tl.arange(0, 64)
    if IN % 128 == 0:
        x = tl.load(x_at[:, None] + column[None, :])
    else:
        x = tl.load(x_at[:, None] + column[None, :], mask=(column < IN)[None, :], other=0.0)
    return x


@triton.jit
def _codes(weight_at, chunk, half: tl.constexpr, both, IN: tl.constexpr, KIND: tl.constexpr):
    # [COLUMNS, 64]: of four bits half of what `both` holds.
    if KIND == "q8":
        column = chunk * 128 + half * 64 + tl.arange(0, 64)
        codes = tl.load(weight_at[:, None] + column[None, :], mask=(column < IN)[None, :], other=0)
    elif half:
        codes = both >> 4
    else:
        codes = both & 15
    return codes


@triton.jit
def _product(
    x_ptr, weight_ptr, table_ptr, scale_ptr, super_scale_ptr, min_ptr, super_min_ptr, bias_ptr, order_ptr, starts_ptr, share_ptr,
    out_ptr, alpha, limit, EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr, OUT: tl.constexpr,
    IN: tl.constexpr, GROUPS: tl.constexpr, SUPERS: tl.constexpr, KIND: tl.constexpr, MINS: tl.constexpr, E4M3: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # As triton_grouped's; weight [EXPERTS, OUT or 2 * OUT, bytes] and what belongs to it as of gemm/triton_decoded.Codes.
    BLOCKS: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_previous(PDL)
    expert, tile = find(starts_ptr, tl.program_id(0) // BLOCKS, EXPERTS, LANES, ROWS)
    if expert >= EXPERTS:
        return
    place, is_row, pair = rows_of(starts_ptr, order_ptr, expert, tile, ROWS)
    x_at = x_ptr + (pair // TOP_K if FIRST else place.to(tl.int64)) * IN
    ALL: tl.constexpr = 2 * OUT if GATED else OUT
    CHUNKS: tl.constexpr = (IN + 127) // 128
    BYTES: tl.constexpr = IN if KIND == "q8" else CHUNKS * 64
    at_column = column if OUT % COLUMNS == 0 else tl.minimum(column, OUT - 1)
    matrix = expert.to(tl.int64)
    matrix_row = matrix * ALL + at_column
    weight_at = weight_ptr + matrix_row * BYTES
    of_fine, of_coarse = matrix * (GROUPS * ALL) + at_column, matrix * (SUPERS * ALL) + at_column
    scale_at, min_at = scale_ptr + of_fine, min_ptr + of_fine
    super_scale_at, super_min_at = super_scale_ptr + of_coarse, super_min_ptr + of_coarse
    depth = tl.arange(0, 64)
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for chunk in range(CHUNKS):
        both, up_both = 0, 0
        if KIND != "q8":
            both = tl.load(weight_at[:, None] + (chunk * 64 + depth)[None, :]).to(tl.int32)
            if GATED:
                up_both = tl.load(weight_at[:, None] + OUT * BYTES + (chunk * 64 + depth)[None, :]).to(tl.int32)
        for half in tl.static_range(2):
            begin = chunk * 128 + half * 64
            x = _x_columns(x_at, begin, IN)
            weight = decoded(
                _codes(weight_at, chunk, half, both, IN, KIND), begin, table_ptr, scale_at, super_scale_at, min_at, super_min_at,
                ALL, IN, GROUPS, SUPERS, KIND, MINS, E4M3, COLUMNS, 64,
            )  # fmt: skip
            result = tl.dot(x, tl.trans(weight.to(x.dtype)), result, input_precision=PRECISION)
            if GATED:
                weight = decoded(
                    _codes(weight_at + OUT * BYTES, chunk, half, up_both, IN, KIND), begin, table_ptr, scale_at + OUT,
                    super_scale_at + OUT, min_at + OUT, super_min_at + OUT, ALL, IN, GROUPS, SUPERS, KIND, MINS, E4M3, COLUMNS, 64,
                )  # fmt: skip
                up = tl.dot(x, tl.trans(weight.to(x.dtype)), up, input_precision=PRECISION)
    write(
        result, up, bias_ptr, share_ptr, out_ptr, matrix_row, column, place, pair, is_row, alpha, limit,
        OUT, FIRST, GATED, BIASED, ACTIVATION,
    )  # fmt: skip


def _launch(
    shape: ExpertShape, half: Half, codes: Codes, bias: Tensor | None, x: Tensor, routed: Routed, tiles: ProductTiles
) -> Tensor:
    first, columns = half == "gate_up", min(tiles.columns, _MAX_COLUMNS)
    num_pairs = routed.order.shape[0]
    out_features = shape.intermediate_size if first else shape.hidden_size
    out = torch.empty((num_pairs, out_features), dtype=x.dtype, device=x.device)
    max_hit = min(num_pairs, shape.num_experts)
    max_tiles = (num_pairs + max_hit * (tiles.rows - 1)) // tiles.rows
    kind = shape.activation
    alpha, limit = (0.0, 0.0) if isinstance(kind, str) else (kind.alpha, kind.limit)
    _product[(max_tiles * triton.cdiv(out_features, columns),)](
        x, *codes.pointers(), out if bias is None else bias, routed.order, routed.starts, routed.chosen.weights, out, alpha, limit,
        EXPERTS=shape.num_experts, LANES=triton.next_power_of_2(shape.num_experts), TOP_K=routed.chosen.weights.shape[1],
        OUT=out_features, **codes.facts(), ROWS=tiles.rows, COLUMNS=columns, FIRST=first, GATED=first and shape.gated,
        BIASED=bias is not None, ACTIVATION=kind if isinstance(kind, str) else "clamped_swiglu",
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=min(tiles.stages, _MAX_STAGES), **overlap(x.device),
    )  # fmt: skip
    return out
