"""Adapters beside linear layers on a GPU: `python tests/ops/bench_lora.py`, some 40 s.

Linear layers of the 8b shape, one layer's behind another's with norms between, in a graph: microseconds a layer without adapters,
and what adapters of rank 16 on all of them add, for several ways to launch the same kernels. Not a test: figures are for people."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from triton.testing import do_bench

import ops
from ops.compiling import compile_together
from ops.lora import triton_lora
from ops.lora.triton_index import index
from ops.lora.triton_lora import TritonLoraSlots

PIECES = triton_lora._PIECES
NUM_LAYERS, NUM_SLOTS, RANK, HIDDEN, INNER = 8, 65, 16, 4096, 12288
PARTS = {"qkv": (4096, 1024, 1024), "o": (HIDDEN,), "gate_up": (INNER, INNER), "down": (HIDDEN,)}
DEVICE = torch.device("cuda", 0)


class Way(NamedTuple):
    """How. `columns`: of a program that expands; `programs`: of a launch; `pieces`: of the inner sum, up to 512 tokens."""

    name: str
    columns: int = 128
    programs: int = 2048
    pieces: int | None = None


WAYS = (
    Way("as it is"), Way("64 columns", columns=64), Way("1024 programs", programs=1024),
    Way("4096 programs", programs=4096), Way("16 pieces", pieces=16),
)  # fmt: skip


class Layer:
    def __init__(self) -> None:
        self.weights, self.slots, self.blocks = {}, {}, {}
        for name, parts in PARTS.items():
            inner = INNER if name == "down" else HIDDEN
            weight = torch.randn(sum(parts), inner, device=DEVICE).mul_(0.02).bfloat16()
            self.weights[name] = ops.prepare_linear(ops.StoredWeight.dense(weight))
            shape = ops.LoraShape(sum(parts), inner, parts, NUM_SLOTS, RANK)
            self.slots[name] = slots = TritonLoraSlots(shape, torch.bfloat16, DEVICE)
            self.blocks[name] = {columns: slots._cut(columns) for columns in (64, 128)}
            for tensor, value in zip(slots._slots(), (1.0, 1.0, 1e-4), strict=True):
                tensor.fill_(value)

    def linear(self, name: str, x: torch.Tensor, adapters: ops.TokenAdapters | None, way: Way) -> torch.Tensor:
        weight, slots = self.weights[name], self.slots[name]
        if adapters is None:
            return ops.gated_linear(x, weight) if name == "gate_up" else ops.linear(x, weight)
        slots._columns, slots._blocks = way.columns, self.blocks[name][way.columns]
        out = weight.matmul(x)
        if name == "gate_up":
            return slots.gated(x, adapters, out)
        slots.add(x, adapters, out)
        return out


def us(work: Callable[[], None]) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return float(do_bench(graph.replay, warmup=5, rep=30, return_mode="median")) / NUM_LAYERS * 1e3


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--ways", nargs="+", default=[way.name for way in WAYS])
    args = parser.parse_args()
    layers, norm = [Layer() for _ in range(NUM_LAYERS)], torch.ones(HIDDEN, device=DEVICE).bfloat16()
    ways = [way for way in WAYS if way.name in args.ways]

    def run(batch: int, adapters: ops.TokenAdapters | None, way: Way = WAYS[0]) -> None:
        x, residual = (torch.zeros(batch, HIDDEN, device=DEVICE).bfloat16() for _ in range(2))
        triton_lora._PROGRAMS = way.programs
        triton_lora._PIECES = PIECES if way.pieces is None else ((512, way.pieces),)
        for layer in layers:
            x = ops.add_rms_norm(x, residual, norm, 1e-6)
            layer.linear("qkv", x, adapters, way)
            x = layer.linear("o", x, adapters, way)
            x = ops.add_rms_norm(x, residual, norm, 1e-6)
            x = layer.linear("down", layer.linear("gate_up", x, adapters, way), adapters, way)

    with compile_together(DEVICE):
        for batch, way in product(args.batch, ways):
            run(batch, index(torch.zeros(batch, dtype=torch.int32, device=DEVICE), NUM_SLOTS), way)
    for batch in args.batch:
        everyone = torch.arange(batch, dtype=torch.int32, device=DEVICE)
        plain, indexed = us(lambda batch=batch: run(batch, None)), us(lambda slots=everyone: index(slots, NUM_SLOTS))
        print(f"batch {batch}: {plain:.2f} us a layer without adapters; index {indexed * NUM_LAYERS:.2f} us a step")
        for number, way in product([number for number in args.adapters if number <= batch], ways):
            adapters = index(everyone % number, NUM_SLOTS)
            took = us(lambda batch=batch, adapters=adapters, way=way: run(batch, adapters, way))
            print(f"  {number} adapters, {way.name}: +{took - plain:.2f} us a layer, {took / plain:.3f}x", flush=True)


if __name__ == "__main__":
    main()
