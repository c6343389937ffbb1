"""Adapters beside linear layers on a GPU: `python -m tests.benches.ops.lora`, some 40 s.

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
from ops.gemm import tiled_plus
from ops.lora import few_tokens
from ops.lora.triton_index import index
from ops.lora.triton_lora import TritonLoraSlots

NUM_LAYERS, NUM_SLOTS, RANK, HIDDEN, INNER = 8, 65, 16, 4096, 14336
PARTS = {"qkv": (4096, 1024, 1024), "o": (HIDDEN,), "gate_up": (INNER, INNER), "down": (HIDDEN,)}
DEVICE = torch.device("cuda", 0)


class Way(NamedTuple):
    """How. `few`: tokens up to which few_tokens.cu computes, with `twice` tokens or more by programs of twice as many columns;
    `beside`: tokens up to which it shrinks beside the weight's product; `ends`: up to which tiled.cu adds where it ends; `adds`:
    else nothing is added, and gate and up are gated by a kernel of their own."""

    name: str
    few: int = few_tokens.MAX_TOKENS
    twice: int = few_tokens._FEWEST_TOKENS
    beside: int = few_tokens.MAX_BESIDE
    adds: bool = True
    ends: int = 0


WAYS = (
    Way("as it is"), Way("in Triton", few=0), Way("shrinks behind", beside=0), Way("shrinks beside", beside=1 << 20),
    Way("twice", twice=1), Way("never twice", twice=1 << 20), Way("nothing is added", adds=False),
    Way("at the end", ends=tiled_plus.MAX_ROWS),
)  # fmt: skip


class Layer:
    def __init__(self) -> None:
        self.weights, self.slots = {}, {}
        for name, parts in PARTS.items():
            inner = INNER if name == "down" else HIDDEN
            weight = torch.randn(sum(parts), inner, device=DEVICE).mul_(0.02).bfloat16()
            self.weights[name] = ops.prepare_linear(ops.StoredWeight.dense(weight))
            shape = ops.LoraShape(sum(parts), inner, parts, NUM_SLOTS, RANK)
            self.slots[name] = slots = TritonLoraSlots(shape, torch.bfloat16, DEVICE)
            for tensor, value in zip(slots.slots, (1.0, 1.0, 1e-4), strict=True):
                tensor.fill_(value)

    def linear(self, name: str, x: torch.Tensor, adapters: ops.TokenAdapters | None, way: Way) -> torch.Tensor:
        weight, slots = self.weights[name], self.slots[name]
        if adapters is None:
            return ops.gated_linear(x, weight) if name == "gate_up" else ops.linear(x, weight)
        if len(x) <= way.ends:
            return weight.matmul_plus(x, slots.low_rank(x, adapters, gated=name == "gate_up"), gated=name == "gate_up")
        begun = slots.begin(x, adapters) if way.adds else None
        out = weight.matmul(x)
        if not way.adds:
            return ops.silu_mul(out) if name == "gate_up" else out
        if name == "gate_up":
            return slots.gated(x, adapters, out, begun)
        slots.add(x, adapters, out, begun)
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
        few_tokens.MAX_TOKENS, few_tokens._FEWEST_TOKENS, few_tokens.MAX_BESIDE = way.few, way.twice, way.beside
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
