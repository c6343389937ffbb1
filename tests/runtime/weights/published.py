"""Quantised linear layers as published checkpoints have them, written by the layout's own description: tensors, and what they are
worth. Nothing here is shared with what reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight neighbours, from a word's lowest bits on (AutoAWQ, gemm)

Write = Callable[[str, Tensor, torch.Generator], tuple[dict[str, Tensor], Tensor]]


@dataclass(frozen=True)
class Dialect:
    """`write`: tensors by name of a layer with this weight [rows, columns], and its numbers. `format`: as kernels call it.
    `ordered`: columns are in groups in an order of their own."""

    section: Mapping[str, Any]
    write: Write
    format: str
    ordered: bool = False


def words(codes: Tensor, bits: int) -> Tensor:
    """codes [rows, columns] without sign -> [rows, words] int32, the first column lowest."""
    per = 32 // bits
    shifted = codes.long().unflatten(1, (-1, per)) << torch.arange(per) * bits
    packed = shifted.sum(2)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def rounded(weight: Tensor, groups: int, bits: int, *, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], scales [N, groups] in float16, zero points [N, groups]; codes and zero points without sign."""
    grouped = weight.unflatten(1, (groups, -1))
    most = 2**bits - 1
    if zeros:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scales = ((high - low) / most).half()
        points = (-low / scales.float()).round().clamp(0, most)
    else:
        scales = (grouped.abs().amax(2) / (most / 2)).half()
        points = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.float32)
    codes = (grouped / scales.float().unsqueeze(2) + points.unsqueeze(2)).round().clamp(0, most)
    return codes.flatten(1).to(torch.uint8), scales, points.to(torch.uint8)


def worth(codes: Tensor, scales: Tensor, points: Tensor, group_of: Tensor) -> Tensor:
    """The numbers, from the group of each column."""
    return (codes.float() - points.float()[:, group_of]) * scales.float()[:, group_of]


def gptq(bits: int = 4, group: int = 64, *, sym: bool = True, desc_act: bool = False, version: str = "gptq") -> Dialect:
    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        num_columns = weight.shape[1]
        groups = 1 if group == -1 else num_columns // group
        group_of = torch.arange(num_columns) // (num_columns // groups)
        # Of layers with the same input the order is the same, since it follows from that.
        shuffled = torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns))
        places = shuffled if desc_act else torch.arange(num_columns)
        codes, scales, points = rounded(weight[:, places], groups, bits, zeros=not sym)
        codes = codes[:, places.argsort()]
        g_idx = group_of[places.argsort()]
        stored = points.long() - int(version == "gptq") & (1 << bits) - 1
        tensors = {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": words(stored.T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": g_idx.int(),
        }
        return {f"{name}.{role}": each for role, each in tensors.items()}, worth(codes, scales, points, g_idx)

    section = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act,
        "checkpoint_format": version,
    }  # fmt: skip
    return Dialect(section, write, "w4" if bits == 4 else "w8", desc_act)


def awq(group: int = 64) -> Dialect:
    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.shape[1] // group
        codes, scales, points = rounded(weight, groups, 4, zeros=True)

        def packed(columns: Tensor) -> Tensor:
            return words(columns.unflatten(1, (-1, 8))[:, :, AWQ_COLUMNS].flatten(1), 4)

        tensors = {
            "qweight": packed(codes.T), "qzeros": packed(points.T), "scales": scales.T.contiguous(),
        }  # fmt: skip
        group_of = torch.arange(weight.shape[1]) // group
        return {f"{name}.{role}": each for role, each in tensors.items()}, worth(codes, scales, points, group_of)

    section = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Dialect(section, write, "w4")


def packed(bits: int = 4, group: int = 64, *, sym: bool = True, actorder: bool = False) -> Dialect:
    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        num_columns = weight.shape[1]
        groups = num_columns // group
        shuffled = torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns))
        places = shuffled if actorder else torch.arange(num_columns)
        codes, scales, points = rounded(weight[:, places], groups, bits, zeros=not sym)
        codes, group_of = codes[:, places.argsort()], (torch.arange(num_columns) // group)[places.argsort()]
        tensors = {
            "weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        if not sym:
            tensors["weight_zero_point"] = words(points.T.contiguous(), bits).T.contiguous()
        if actorder:
            tensors["weight_g_idx"] = group_of.int()
        return {f"{name}.{role}": each for role, each in tensors.items()}, worth(codes, scales, points, group_of)

    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "group", "group_size": group}
    return Dialect(_compressed("pack-quantized", weights), write, "w4" if bits == 4 else "w8", actorder)


def int8() -> Dialect:
    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        codes = (weight / scales.float()).round().clamp(-127, 127).to(torch.int8)
        tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scales}
        return tensors, codes.float() * scales.float()

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return Dialect(_compressed("int-quantized", weights), write, "w8")


def bitsandbytes() -> Dialect:
    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight * (127 / largest[:, None])).round().to(torch.int8)
        tensors = {
            f"{name}.weight": codes,
            f"{name}.SCB": largest,
            f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return tensors, codes.float() * largest[:, None] / 127

    return Dialect({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, write, "w8")


def fp8(section: Mapping[str, Any], block: tuple[int, int] | None, scale_name: str, dtype: torch.dtype) -> Dialect:
    """`block`: None for one scale; whole rows are blocks of (1, 0)."""

    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        down, across = (rows, columns) if block is None else (block[0], block[1] or columns)
        shape = -(-rows // down), -(-columns // across)
        scales = ((torch.rand(shape, generator=random) + 0.5) / 448).to(dtype)
        wide = scales.float().repeat_interleave(down, 0).repeat_interleave(across, 1)[:rows, :columns]
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors = {f"{name}.weight": codes, f"{name}.{scale_name}": scales.flatten() if block is None else scales}
        if block is None:
            tensors[f"{name}.input_scale"] = torch.rand(1, generator=random)
        return tensors, codes.float() * wide

    return Dialect(section, write, "fp8")


def _compressed(written: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": written, "config_groups": groups, "ignore": ["lm_head"]}


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic"}
DIALECTS = {
    "gptq": gptq(),
    "gptq, asymmetric": gptq(sym=False),
    "gptq v2, asymmetric": gptq(sym=False, version="gptq_v2"),
    "gptq, desc_act": gptq(desc_act=True),
    "gptq, desc_act, asymmetric": gptq(desc_act=True, sym=False, group=32),
    "gptq, 8 bits": gptq(8, 128),
    "gptq, no groups": gptq(group=-1),
    "awq": awq(),
    "awq, groups of 32": awq(32),
    "pack-quantized": packed(),
    "pack-quantized, asymmetric": packed(sym=False),
    "pack-quantized, actorder": packed(actorder=True),
    "pack-quantized, 8 bits": packed(8),
    "int-quantized": int8(),
    "bitsandbytes": bitsandbytes(),
    "float-quantized": fp8(_compressed("float-quantized", _FLOAT8), (1, 0), "weight_scale", torch.bfloat16),
    "fp8, one scale": fp8(BLOCKS, None, "weight_scale", torch.float32),
    "fp8, blocks of 128": fp8(BLOCKS | {"weight_block_size": [128, 128]}, (128, 128), "weight_scale_inv", torch.float32),
    "fp8, blocks of 48 by 64": fp8(BLOCKS | {"weight_block_size": [48, 64]}, (48, 64), "weight_scale_inv", torch.bfloat16),
    "fp8, blocks wider than what is left": fp8(
        BLOCKS | {"weight_block_size": [64, 96]}, (64, 96), "weight_scale_inv", torch.float32
    ),
    "modelopt": fp8({"quant_method": "modelopt", "quant_algo": "FP8"}, None, "weight_scale", torch.float32),
}  # fmt: skip
