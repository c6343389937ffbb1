"""Mixture of experts with weights in codes (`ops.stored.CODED`), or in ggml's blocks, which are converted to such codes:
grouped products by experts_coded.cu on Hopper, if it supports them, else by triton_grouped.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ops.cuda.program import missing_for_hopper
from ops.gemm import pieces
from ops.gemm.lay import fit_pieces, groups_of, in_features_of, kind_of, lay
from ops.gemm.triton_coded import Codes
from ops.gemm.weight import check_refill, overwrite
from ops.moe import experts_coded, triton_grouped
from ops.moe.triton_experts import GroupedExpertWeights, tiles_for
from ops.moe.triton_grouped import Added
from ops.moe.triton_route import Routed
from ops.moe.weights import ExpertShape, Half
from ops.stored import DECODED, Stored, StoredWeight, WeightFormat, bias_of, formats_of, parts_of
from ops.tuning.numbers import ProductTiles


class _Kept(NamedTuple):
    """Weights of all experts, by role as in `lay`, each [experts, ...]. `codes`: for Triton's kernel, None for pieces."""

    written: WeightFormat
    kind: WeightFormat
    groups: int
    roles: dict[str, Tensor]
    codes: Codes | None


class CodedExpertWeights(GroupedExpertWeights):
    """Experts in codes. The first expert filled sets each half's format; group sizes of fp8, w8 and w4 must fit its own."""

    takes_adapters = False

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.nbytes = shape, 0
        self._dtype, self._device, self._tiles = dtype, device, tiles_for(dtype, device)
        self._weights: dict[Half, _Kept] = {}
        self._biases: dict[Half, Tensor] = {}

    def fill(self, half: Half, expert: int, stored: Stored) -> None:
        parts = parts_of(stored)
        if all("weight" in part.tensors for part in parts):
            self._fill_weight(half, expert, parts)
        bias = bias_of(parts)
        if bias is None:
            return
        if half not in self._biases and self.shape.bias:
            room = (self.shape.num_experts, self.shape.matrix(half)[0])
            self._biases[half] = torch.empty(room, dtype=self._dtype, device=self._device)
            self.nbytes += self._biases[half].nbytes
        overwrite(self._biases[half][expert] if self.shape.bias else None, bias, "bias")

    def _fill_weight(self, half: Half, expert: int, parts: tuple[StoredWeight, ...]) -> None:
        """Store one expert's weight. Raises ValueError if it does not match the stored experts."""
        formats, current = formats_of(parts), self._weights.get(half)
        if len(formats) != 1 or (current is not None and formats[0] != current.written):
            kept = "codes of one kind" if current is None else str(current.written)
            raise ValueError(f"experts in {' and '.join(map(str, formats))} where {kept} are kept")
        size = sum(len(part.weight) for part in parts), in_features_of(parts[0])
        check_refill("weight", size, self.shape.matrix(half))
        if current is None:
            given = lay(parts, in_pieces=self._fit_pieces(half, parts))
            current = self._weights[half] = self._kept(parts, given)
            self.written = tuple(
                (name, str(kept.written), kept.groups, *kept.roles) for name, kept in self._weights.items()
            )
        else:
            groups = set(map(groups_of, parts))
            if max(groups) > current.groups or (current.kind in DECODED and groups != {current.groups}):
                raise ValueError(f"an expert in {max(groups)} groups of columns where {current.groups} are kept")
            given = lay(parts, in_pieces=current.codes is None, groups=current.groups)
        if ("order" in given) != ("order" in current.roles):
            raise ValueError("either all experts have their columns in an order of their own or none")
        if given.keys() != current.roles.keys():
            raise ValueError(f"an expert with {', '.join(given)} where {', '.join(current.roles)} are kept")
        for role, room in current.roles.items():
            overwrite(room[expert], given[role], role)

    def _fit_pieces(self, half: Half, parts: tuple[StoredWeight, ...]) -> bool:
        if self._dtype == torch.float32 or missing_for_hopper() is not None or not fit_pieces(parts):
            return False
        is_ordered = any("order" in part.tensors for part in parts)
        return not is_ordered and experts_coded.fits(kind_of(parts[0]), self.shape, max(map(groups_of, parts)), half)

    def _kept(self, parts: tuple[StoredWeight, ...], given: dict[str, Tensor]) -> _Kept:
        roles = {
            role: one.new_empty((self.shape.num_experts, *one.shape), device=self._device)
            for role, one in given.items()
        }
        kind, written = kind_of(parts[0]), parts[0].format
        codes = None if "pieces" in roles else Codes(kind, in_features_of(parts[0]), **roles)
        self.nbytes += sum(each.nbytes for each in roles.values())
        return _Kept(written, kind, max(map(groups_of, parts)), roles, codes)

    def product(self, half: Half, x: Tensor, routed: Routed, tiles: ProductTiles, added: Added | None) -> Tensor:
        assert added is None, "adapters do not change experts in codes"
        kept, bias = self._weights[half], self._biases.get(half)
        if kept.codes is not None:
            return triton_grouped.product(self.shape, half, kept.codes, bias, x, routed, tiles)
        weight = kept.roles["pieces"]
        groups, clamped = pieces.groups_of(kept.kind, weight), not isinstance(self.shape.activation, str)
        experts_coded.compile_ahead(kept.kind, groups, x.dtype, x.device, clamped=clamped)
        return experts_coded.experts_coded(kept.kind, self.shape, half, weight, bias, x, routed)
