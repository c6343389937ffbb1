"""Weights in codes that are decoded in registers beside those in bfloat16: `python -m tests.benches.ops.decoded [served] [tiles]
[experts] [kinds ...] [rows ...]`.

`served`: a layer of the 8B shape, as `ops.linear` and `ops.gated_linear` go; `tiles`: other tiles of triton_coded.py than are
chosen; `experts`: those of Qwen3-30B-A3B and of GPT-OSS-20B. As in cuda.py a time is that of one of many copies in a graph,
in microseconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

import ops
from ops.gemm import coded, triton_coded
from ops.gemm.coded import RowsLinearWeight
from ops.gemm.cuda import CudaLinearWeight
from ops.gemm.triton_coded import CodedTile
from ops.gemm.weight import LinearWeight
from ops.moe.coded import CodedExpertWeights
from ops.moe.triton_experts import GroupedExpertWeights, TritonExpertWeights
from ops.moe.weights import Half
from ops.stored import E2M1, NF4, StoredWeight
from tests.benches.ops.coded import GATED, LAYER, each, x_of
from tests.ops.moe_case import Clamped
from tests.ops.test_coded_linear import to
from tests.ops.test_decoded_linear import blocks, drawn

KINDS: dict[str, Callable[[int, int], StoredWeight]] = {
    "bf16": lambda rows, columns: StoredWeight.dense(torch.randn(rows, columns, device="cuda").bfloat16()),
    "nf4": lambda rows, columns: drawn(NF4, rows, columns, columns // 64),
    "nvfp4": lambda rows, columns: drawn(E2M1, rows, columns, columns // 16, "super"),
    **{
        kind: lambda rows, columns, kind=kind: blocks(kind, rows, columns)
        for kind in ("MXFP4", "Q4_0", "Q4_K", "Q6_K", "Q8_0")
    },
}
SUPER_BLOCKS = ("Q4_K", "Q6_K")  # of 256 columns
HALVES: tuple[Half, Half] = ("gate_up", "down")
EXPERTS = {
    "30b-a3b": (ops.ExpertShape(128, 2048, 768), ops.Routing(8, renormalize=True)),
    "gpt-oss-20b": (ops.ExpertShape(32, 2880, 2880, True, Clamped(1.702, 7.0)), ops.Routing(4)),
}


def copies_of(kind: str, out_features: int, in_features: int) -> list[LinearWeight]:
    """As many as no cache holds."""
    stored = to(KINDS[kind](out_features, in_features), "cuda")
    prepare = CudaLinearWeight if kind == "bf16" else coded.prepare
    made = [prepare(stored)]
    return made + [prepare(stored) for _ in range(max(1, min(15, int(2e8 / made[0].nbytes))))]


def bench_served(kinds: Sequence[str], counts: Sequence[int]) -> None:
    totals = {(kind, count): 0.0 for kind in kinds for count in counts}
    for out_features, in_features in LAYER:
        run = ops.gated_linear if (out_features, in_features) == GATED else ops.linear
        for kind in kinds:
            weights = copies_of(kind, out_features, in_features)
            for count in counts:
                x = x_of(count, in_features)
                totals[kind, count] += each(weights, lambda weight, x=x, run=run: run(x, weight))
            del weights
    for kind in kinds:
        print(f"{kind:8} a layer  " + "  ".join(f"{count}: {totals[kind, count]:6.1f}" for count in counts), flush=True)


def bench_tiles(kinds: Sequence[str], counts: Sequence[int]) -> None:
    shape = GATED
    for kind in kinds:
        stored = to(KINDS[kind](*shape), "cuda")
        weights = [RowsLinearWeight(stored) for _ in range(4)]
        for count in counts:
            rows, x, times = min(128, max(16, 1 << (count - 1).bit_length())), x_of(count, shape[1]), {}
            for columns in (16, 32, 64, 128):
                for splits in (1, 4) if rows <= 64 else (1,):
                    for warps in (2, 4, 8):
                        for stages in (2, 4):
                            tile = CodedTile(rows, columns, 64, splits, warps, stages)
                            try:
                                times[tile] = each(
                                    weights[:4],
                                    lambda weight, tile=tile, x=x: triton_coded.linear(
                                        x, weight._codes, None, tile=tile
                                    ),
                                )
                            except Exception as error:  # too much shared memory, or too few lanes
                                print(tile, str(error)[:60])
            best = sorted(times, key=times.__getitem__)[:4]
            print(
                f"{kind} {shape} {count}: " + ", ".join(f"{times[tile]:.1f} {tuple(tile)}" for tile in best), flush=True
            )


def bench_experts(kinds: Sequence[str], counts: Sequence[int]) -> None:
    for name, (shape, routing) in EXPERTS.items():
        for kind in kinds:
            if kind in SUPER_BLOCKS and any(shape.matrix(half)[1] % 256 for half in HALVES):
                continue
            layers: list[GroupedExpertWeights] = []
            for _ in range(2):
                made = (TritonExpertWeights if kind == "bf16" else CodedExpertWeights)(
                    shape, torch.bfloat16, torch.device("cuda")
                )
                for half in HALVES:
                    rows, columns = shape.matrix(half)
                    stored = to(KINDS[kind](rows, columns), "cuda")
                    bias = torch.zeros(rows, device="cuda", dtype=torch.bfloat16) if shape.bias else None
                    for expert in range(shape.num_experts):
                        made.fill(half, expert, stored.with_bias(bias))
                layers.append(made)
            times = []
            for count in counts:
                x, logits = x_of(count, shape.hidden_size), x_of(count, shape.num_experts)
                time = each(
                    layers, lambda layer, x=x, logits=logits, routing=routing: layer.mix(x, logits, routing, None, None)
                )
                times.append(f"{count}: {time:7.1f}")
            print(f"{name} {kind:6} {layers[0].nbytes / 1e9:.2f} GB a layer  {'  '.join(times)}", flush=True)
            del layers


def main() -> None:
    kinds = [kind for kind in KINDS if kind in sys.argv] or list(KINDS)
    counts = [int(each) for each in sys.argv[1:] if each.isdigit()] or [1, 16, 64, 256, 2048]
    for name, bench in {"served": bench_served, "tiles": bench_tiles, "experts": bench_experts}.items():
        if name in sys.argv or not set(sys.argv) & {"served", "tiles", "experts"}:
            bench(kinds, counts)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
