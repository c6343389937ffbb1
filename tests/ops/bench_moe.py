"""Mixture of experts on a GPU: `python tests/ops/bench_moe.py [tiles] [tokens ...]`.

The shape of Qwen3-30B-A3B. Each time is one of several calls in a graph, with other routings and other layers' weights in turn, so
that no cache holds them. Floors: the bytes of the experts that are hit at the speed of a copy, the products at the speed of the
tensor cores. A table of `ops.moe` by its parts; `tiles` first tries others, and prints the best of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch

import ops
from ops.moe.triton_experts import TritonExpertWeights, mix
from ops.moe.triton_grouped import add_parts, product
from ops.moe.triton_route import Routed, route
from ops.moe.weights import Half
from ops.tuning.numbers import ExpertTiles, ProductTiles
from tests.ops.bench_cuda import COPY_BYTES_PER_US, us

SHAPE = ops.ExpertShape(128, 2048, 768)
ROUTING = ops.Routing(8, renormalize=True)
FLOP_PER_US = 8e8  # what large dense products reach on an H200 in bfloat16
LAYERS, STEPS = 2, 8
SHOWN = 4  # of the best tiles
HALVES: tuple[Half, Half] = ("gate_up", "down")


class Step(NamedTuple):
    experts: TritonExpertWeights
    x: torch.Tensor
    inner: torch.Tensor
    logits: torch.Tensor
    routed: Routed

    def mixed(self, choice: ExpertTiles) -> torch.Tensor:
        return mix(self.experts, self.x, self.logits, ROUTING, None, None, choice)

    def half(self, half: Half, how: ProductTiles) -> None:
        product(self.experts, half, self.x if half == "gate_up" else self.inner, self.routed, how)


def steps_of(num_tokens: int, layers: list[TritonExpertWeights]) -> list[Step]:
    steps = []
    for step in range(STEPS):
        x = torch.randn(num_tokens, SHAPE.hidden_size, device="cuda").bfloat16()
        logits = torch.randn(num_tokens, SHAPE.num_experts, device="cuda").bfloat16()
        inner = torch.randn(num_tokens * ROUTING.top_k, SHAPE.intermediate_size, device="cuda").bfloat16()
        steps.append(Step(layers[step % LAYERS], x, inner, logits, route(logits, ROUTING)))
    return steps


def each(steps: list[Step], call: Callable[[Step], object]) -> float:
    def work() -> None:
        for step in steps:
            call(step)

    return us(work, len(steps))


def floor(halves: tuple[Half, ...], steps: list[Step]) -> float:
    """Of an average step, in us."""
    hit = sum(int((step.routed.starts.diff() > 0).sum()) for step in steps) / len(steps)
    weights = sum(out_features * in_features for out_features, in_features in map(SHAPE.matrix, halves))
    return max(hit * weights * 2 / COPY_BYTES_PER_US, 2 * steps[0].inner.shape[0] * weights / FLOP_PER_US)


def table(counts: list[int], layers: list[TritonExpertWeights]) -> None:
    columns = ("tokens", "route", "gate_up", "down", "add", "all", "floor", "bytes' share of time")
    print(" ".join(f"{column:>8}" for column in columns), flush=True)
    for num_tokens in counts:
        steps = steps_of(num_tokens, layers)
        choice = layers[0].choose(num_tokens, ROUTING.top_k)
        parts = torch.randn(num_tokens * ROUTING.top_k, SHAPE.hidden_size, device="cuda").bfloat16()
        took = [
            each(steps, lambda step: route(step.logits, ROUTING)),
            *(
                each(steps, lambda step, half=half, choice=choice: step.half(half, getattr(choice, half)))
                for half in HALVES
            ),
            each(steps, lambda _, parts=parts: add_parts(parts, ROUTING.top_k, None)),
        ]
        whole, least = each(steps, lambda step, choice=choice: step.mixed(choice)), floor(HALVES, steps)
        numbers = " ".join(f"{us:8.1f}" for us in (*took, whole, least))
        print(f"{num_tokens:8} {numbers} {least / whole:8.0%}", flush=True)
    print("us a layer")


def candidates(num_tokens: int) -> Iterator[ProductTiles]:
    per_expert = num_tokens * ROUTING.top_k / SHAPE.num_experts
    if per_expert <= 16:
        for columns, depth, warps in ((32, 128, 4), (32, 256, 2), (64, 64, 4), (64, 128, 4), (128, 64, 4)):
            yield from (ProductTiles(16, columns, depth, warps, stages) for stages in (3, 5))
    if 4 <= per_expert <= 64:
        yield from (ProductTiles(32, columns, depth, 4, 4) for columns in (64, 128) for depth in (64, 128))
        yield from (ProductTiles(64, columns, 64, 4, stages) for columns in (64, 128) for stages in (3, 4))
    if per_expert >= 32:
        yield from (ProductTiles(128, columns, 64, 8, stages) for columns in (64, 128, 256) for stages in (3, 4))


def try_tiles(counts: list[int], layers: list[TritonExpertWeights]) -> None:
    for num_tokens in counts:
        steps = steps_of(num_tokens, layers)
        for half in HALVES:
            times: dict[ProductTiles, float] = {}
            for how in candidates(num_tokens):
                try:
                    times[how] = each(steps, lambda step, half=half, how=how: step.half(half, how))
                except Exception as error:
                    print(f"  {how}: {type(error).__name__} {str(error)[:80]}")
                    torch.cuda.synchronize()
            best = sorted(times, key=times.__getitem__)[:SHOWN]
            found = "; ".join(f"{times[how]:.1f} {tuple(how)}" for how in best)
            print(f"{num_tokens} tokens, {half}: floor {floor((half,), steps):.1f}, best {found}", flush=True)


def compile_all(counts: list[int], layers: list[TritonExpertWeights], *, tiles: bool) -> None:
    """At the same time, what is measured one after another."""
    step = steps_of(1, layers)[0]
    choices = [layers[0].choose(count, ROUTING.top_k) for count in counts]
    wanted = {(half, getattr(choice, half)) for choice in choices for half in HALVES}
    if tiles:
        wanted |= {(half, how) for count in counts for how in candidates(count) for half in HALVES}

    def compile_one(half: Half, how: ProductTiles) -> None:
        with suppress(Exception):  # too large for the device: said where it is measured
            step.half(half, how)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda pair: compile_one(*pair), wanted))
    torch.cuda.synchronize()
    print(f"{len(wanted)} kernels compiled", flush=True)


def main() -> None:
    tiles = "tiles" in sys.argv[1:]
    counts = [int(word) for word in sys.argv[1:] if word != "tiles"] or [1, 2, 4, 8, 32, 128, 256, 2048, 8192]
    layers = [TritonExpertWeights(SHAPE, torch.bfloat16, torch.device("cuda")) for _ in range(LAYERS)]
    for layer in layers:
        for weight in layer.weights.values():
            weight.normal_(std=0.02)
    compile_all(counts, layers, tiles=tiles)
    if tiles:
        try_tiles(counts, layers)
    table(counts, layers)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
