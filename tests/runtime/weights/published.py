"""Quantised linear layers as published checkpoints have them, written by the layout's own description: tensors, and what they are
worth. Nothing here is shared with what reads them."""

from __future__ import annotations

import json
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
    `ordered`: columns are in groups in an order of their own. `texts`: what the file's header says of the layer."""

    section: Mapping[str, Any]
    write: Write
    format: str
    ordered: bool = False
    texts: Callable[[str], dict[str, str]] = lambda name: {}


def words(codes: Tensor, bits: int) -> Tensor:
    """codes [rows, columns] without sign -> [rows, words] int32, the first column lowest."""
    per = 32 // bits
    shifted = codes.long().unflatten(1, (-1, per)) << torch.arange(per) * bits
    packed = shifted.sum(2)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def rounded(weight: Tensor, groups: int, bits: int, *, zeros: bool, one: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], scales [N, groups] in float16, zero points [N, groups]; codes and zero points without sign. `one`: all groups
    have the same."""
    grouped = weight.unflatten(1, (groups, -1))
    most = 2**bits - 1
    if one:
        grouped = grouped.flatten().expand(len(weight), groups, -1)
    if zeros:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scales = ((high - low) / most).half()
        points = (-low / scales.float()).round().clamp(0, most)
    else:
        scales = (grouped.abs().amax(2) / (most / 2)).half()
        points = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.float32)
    grouped = weight.unflatten(1, (groups, -1))
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


def packed(bits: int = 4, group: int = 64, *, sym: bool = True, actorder: bool = False, one: bool = False) -> Dialect:
    """`one`: scale for all of a weight, whose zero point is not packed."""

    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        num_columns = weight.shape[1]
        groups = num_columns // group
        shuffled = torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns))
        places = shuffled if actorder else torch.arange(num_columns)
        codes, scales, points = rounded(weight[:, places], groups, bits, zeros=not sym, one=one)
        codes, group_of = codes[:, places.argsort()], (torch.arange(num_columns) // group)[places.argsort()]
        tensors = {
            "weight_packed": words(codes, bits), "weight_scale": scales[0, :1] if one else scales,
            "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        if not sym:
            tensors["weight_zero_point"] = (
                (points[0, :1].int() - 2 ** (bits - 1)).to(torch.int8)
                if one
                else words(points.T.contiguous(), bits).T.contiguous()
            )
        if actorder:
            tensors["weight_g_idx"] = group_of.int()
        return {f"{name}.{role}": each for role, each in tensors.items()}, worth(codes, scales, points, group_of)

    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "group", "group_size": group}
    if one:
        weights |= {"strategy": "tensor", "group_size": None}
    written = "w4" if bits == 4 else "w8" if sym else "q8"
    return Dialect(_compressed("pack-quantized", weights), write, written, actorder)


def mixed() -> Dialect:
    """Layers in four and eight bits, by the targets of two groups, of which the more general stands first."""
    narrow, wide = packed(), packed(8)

    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        in_eight = name.endswith(("layers.0.self_attn.q_proj", "v_proj", "down_proj", "w2"))
        return (wide if in_eight else narrow).write(name, weight, random)

    (general,) = narrow.section["config_groups"].values()
    (named,) = wide.section["config_groups"].values()
    targets = ["model.layers.0.self_attn.q_proj", "v_proj", r"re:.*\.(down_proj|w2)$"]
    groups = {"group_0": general, "group_1": named | {"targets": targets}}
    return Dialect(dict(narrow.section) | {"config_groups": groups}, write, "w4")


def int8(*, sym: bool = True, one: bool = False) -> Dialect:
    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, points = rounded(weight, 1, 8, zeros=not sym, one=one)
        kept = slice(0, 1) if one else slice(None)
        tensors = {"weight": (codes.int() - 128).to(torch.int8), "weight_scale": scales.bfloat16()[kept]}
        if not sym:
            tensors["weight_zero_point"] = (points.int() - 128).to(torch.int8)[kept]
        tensors = {
            f"{name}.{role}": each.flatten() if one and role != "weight" else each for role, each in tensors.items()
        }
        return tensors, worth(codes, scales.bfloat16(), points, torch.zeros(weight.shape[1], dtype=torch.long))

    weights = {"num_bits": 8, "type": "int", "symmetric": sym, "strategy": "tensor" if one else "channel"}
    return Dialect(_compressed("int-quantized", weights), write, "w8" if sym else "q8")


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


NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0.0, 0.005208333488553762, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(numbers: Tensor, table: Tensor) -> Tensor:
    """Places in the table, of the same shape."""
    return (numbers.unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)


def bitsandbytes4(kind: str, block: int, *, nested: bool) -> Dialect:
    """`nested`: the largest number of each block is in eight bits itself, 256 of which have one of their own."""
    table = torch.tensor(NF4 if kind == "nf4" else FP4 + [-each for each in FP4])

    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        flat = weight.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
        largest = blocks.abs().amax(1)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
        found = {"absmax": largest, "quant_map": table}
        if nested:
            offset, places = float(largest.mean()), torch.linspace(-1, 1, 256)
            shifted = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
            of_256 = shifted.abs().amax(1)
            codes = nearest(shifted / of_256[:, None], places)
            largest = (places[codes.long()] * of_256[:, None] + offset).flatten()[: len(largest)]
            found |= {"absmax": codes.flatten()[: len(largest)], "nested_absmax": of_256, "nested_quant_map": places}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        codes = nearest(blocks / largest[:, None], table)
        numbers = (table[codes.long()] * largest[:, None]).flatten()[: len(flat)].view(weight.shape)
        codes = codes.flatten()[: len(flat)]
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        found |= {f"quant_state.bitsandbytes__{kind}": text}
        tensors = {f"{name}.weight.{role}": each for role, each in found.items()}
        return tensors | {f"{name}.weight": (codes[0::2] << 4 | codes[1::2]).unsqueeze(1)}, numbers

    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}
    return Dialect(section, write, kind if 128 % block == 0 else f"{kind} in blocks across rows")


def torchao4(group: int = 32) -> Dialect:
    """Its Int4Tensor, as bfloat16 models have it."""

    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        grouped = weight.unflatten(1, (-1, group))
        low, high = grouped.amin(2), grouped.amax(2)
        scales = ((high - low) / 15).bfloat16()
        zeros = (low + 8 * scales.float()).bfloat16()
        codes = ((grouped - zeros.float().unsqueeze(2)) / scales.float().unsqueeze(2)).round().clamp(-8, 7)
        flat = codes.to(torch.int8).flatten(1)
        tensors = {"qdata": flat[:, 0::2] & 15 | flat[:, 1::2] << 4, "scale": scales.t(), "zero_point": zeros.t()}
        numbers = codes * scales.float().unsqueeze(2) + zeros.float().unsqueeze(2)
        return {f"{name}._weight_{role}": each for role, each in tensors.items()}, numbers.flatten(1)

    said = {
        "_type": "Int4Tensor",
        "_data": {"block_size": [1, group]},
        "_tensor_data_names": ["qdata", "scale", "zero_point"],
    }
    return Dialect({"quant_method": "torchao"}, write, "q4", texts=lambda name: {f"{name}.weight": json.dumps(said)})


def nvfp4(section: Mapping[str, Any], names: tuple[str, str], *, divides: bool) -> Dialect:
    """`names`: of codes and of the scale of all."""

    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        table, of_all = torch.tensor(E2M1 + [-each for each in E2M1]), float(weight.abs().max()) / (448 * 6)
        grouped = weight.unflatten(1, (-1, 16))
        scales = (grouped.abs().amax(2) / 6 / of_all).to(torch.float8_e4m3fn)
        wide = (scales.float() * of_all).unsqueeze(2)
        codes = nearest(grouped / wide.clamp(min=1e-30), table)
        flat = codes.flatten(1)
        tensors = {
            names[0]: flat[:, 0::2] | flat[:, 1::2] << 4, "weight_scale": scales,
            names[1]: torch.tensor([1 / of_all if divides else of_all]), "input_scale": torch.ones(1),
        }  # fmt: skip
        return {f"{name}.{role}": each for role, each in tensors.items()}, (table[codes.long()] * wide).flatten(1)

    return Dialect(section, write, "e2m1")


def mxfp4(section: Mapping[str, Any]) -> Dialect:
    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        table, grouped = torch.tensor(E2M1 + [-each for each in E2M1]), weight.unflatten(1, (-1, 32))
        exponents = torch.floor(torch.log2(grouped.abs().amax(2).clamp(min=1e-30))) - 2  # 4 to 8 in units of it
        wide = torch.exp2(exponents).unsqueeze(2)
        codes = nearest(grouped / wide, table)
        flat = codes.flatten(1)
        tensors = {
            "weight_packed": flat[:, 0::2] | flat[:, 1::2] << 4,
            "weight_scale": (exponents + 127).to(torch.uint8),
        }
        return {f"{name}.{role}": each for role, each in tensors.items()}, (table[codes.long()] * wide).flatten(1)

    return Dialect(section, write, "MXFP4")


def fp8(section: Mapping[str, Any], block: tuple[int, int] | None, scale_name: str, dtype: torch.dtype) -> Dialect:
    """`block`: None for one scale; whole rows are blocks of (1, 0)."""

    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        down, across = (rows, columns) if block is None else (block[0], block[1] or columns)
        shape = -(-rows // down), -(-columns // across)
        scales = ((torch.rand(shape, generator=random) + 0.5) / 448).to(dtype)
        wide = scales.float().repeat_interleave(down, 0).repeat_interleave(across, 1)[:rows, :columns]
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        bare = (
            scales.view(torch.uint8)
            if dtype == torch.float8_e8m0fnu and "compressed" in section["quant_method"]
            else scales
        )
        tensors = {f"{name}.weight": codes, f"{name}.{scale_name}": bare.flatten() if block is None else bare}
        if block is None:
            tensors[f"{name}.input_scale"] = torch.rand(1, generator=random)
        return tensors, codes.float() * wide

    return Dialect(section, write, "fp8")


def _compressed(written: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": written, "config_groups": groups, "ignore": ["lm_head"]}


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
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
    "pack-quantized, 8 bits, asymmetric": packed(8, sym=False),
    "pack-quantized, 8 bits, one scale": packed(8, one=True),
    "pack-quantized, 4 and 8 bits": mixed(),
    "pack-quantized, one scale, asymmetric": packed(one=True, sym=False),
    "int-quantized": int8(),
    "int-quantized, asymmetric": int8(sym=False),
    "int-quantized, one scale, asymmetric": int8(one=True, sym=False),
    "bitsandbytes": bitsandbytes(),
    "bitsandbytes, nf4": bitsandbytes4("nf4", 64, nested=True),
    "bitsandbytes, fp4": bitsandbytes4("fp4", 64, nested=False),
    "bitsandbytes, wide blocks": bitsandbytes4("nf4", 512, nested=True),
    "torchao, int4": torchao4(),
    "nvfp4-pack-quantized": nvfp4(
        _compressed("nvfp4-pack-quantized", _FLOAT4), ("weight_packed", "weight_global_scale"), divides=True
    ),
    "mxfp4-pack-quantized": mxfp4(_compressed("mxfp4-pack-quantized", _FLOAT4 | {"strategy": "group", "group_size": 32})),
    "modelopt, nvfp4": nvfp4({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("weight", "weight_scale_2"), divides=False),
    "float-quantized": fp8(_compressed("float-quantized", _FLOAT8), (1, 0), "weight_scale", torch.bfloat16),
    "fp8, one scale": fp8(BLOCKS, None, "weight_scale", torch.float32),
    "fp8, blocks of 128": fp8(BLOCKS | {"weight_block_size": [128, 128]}, (128, 128), "weight_scale_inv", torch.float32),
    "fp8, blocks of 128 by powers of two": fp8(
        BLOCKS | {"weight_block_size": [128, 128]}, (128, 128), "weight_scale_inv", torch.float8_e8m0fnu
    ),
    "mxfp8-quantized": fp8(
        _compressed("mxfp8-quantized", _FLOAT8 | {"strategy": "group", "group_size": 32}), (1, 32), "weight_scale",
        torch.float8_e8m0fnu,
    ),
    "fp8, blocks of 48 by 64": fp8(BLOCKS | {"weight_block_size": [48, 64]}, (48, 64), "weight_scale_inv", torch.bfloat16),
    "fp8, blocks wider than what is left": fp8(
        BLOCKS | {"weight_block_size": [64, 96]}, (64, 96), "weight_scale_inv", torch.float32
    ),
    "modelopt": fp8({"quant_method": "modelopt", "quant_algo": "FP8"}, None, "weight_scale", torch.float32),
}  # fmt: skip
