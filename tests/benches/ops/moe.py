"""Mixture of experts on a GPU: `python -m tests.benches.ops.moe [tiles] [coded] [tokens ...]`.

The shape of Qwen3-30B-A3B. Each time is one of several calls in a graph, with other routings and other layers' weights in turn, so
that no cache holds them. Floors: the bytes of the experts that are hit at the speed of a copy, the products at the speed of the
tensor cores. A table of `ops.moe` by its parts; `tiles` first tries others, and prints the best of them; `coded` sets experts
in codes and scales beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch

import ops
from ops.moe.coded import CodedExpertWeights
from ops.moe.triton_experts import GroupedExpertWeights, TritonExpertWeights, mix
from ops.moe.triton_grouped import add_parts
from ops.moe.triton_route import Routed, route
from ops.moe.weights import Half
from ops.stored import FP8, W4, StoredWeight, WeightFormat
from ops.tuning.numbers import ExpertTiles, ProductTiles
from tests.benches.ops.cuda import COPY_BYTES_PER_US, us

SHAPE = ops.ExpertShape(128, 2048, 768)
ROUTING = ops.Routing(8, renormalize=True)
FLOP_PER_US = 8e8  # what large dense products reach on an H200 in bfloat16
LAYERS, STEPS = 2, 8
SHOWN = 4  # of the best tiles
HALVES: tuple[Half, Half] = ("gate_up", "down")


class Step(NamedTuple):
    experts: GroupedExpertWeights
    x: torch.Tensor
    inner: torch.Tensor
    logits: torch.Tensor
    routed: Routed

    def mixed(self, choice: ExpertTiles) -> torch.Tensor:
        return mix(self.experts, self.x, self.logits, ROUTING, None, None, choice)

    def half(self, half: Half, how: ProductTiles) -> None:
        self.experts.product(half, self.x if half == "gate_up" else self.inner, self.routed, how, None)


def steps_of(num_tokens: int, layers: Sequence[GroupedExpertWeights]) -> list[Step]:
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


def coded(counts: list[int], layers: list[TritonExpertWeights]) -> None:
    """`ops.moe` in microseconds, of each scheme; columns in groups of 128 where it says so."""
    for name, codes, group in (("fp8", FP8, 0), ("fp8/128", FP8, 128), ("w4/128", W4, 128)):
        filled = [coded_experts(codes, group) for _ in range(LAYERS)]
        times = []
        for num_tokens in counts:
            ours, plain = steps_of(num_tokens, filled), steps_of(num_tokens, layers)
            choice = layers[0].choose(num_tokens, ROUTING.top_k)
            took = [each(steps, lambda step, choice=choice: step.mixed(choice)) for steps in (ours, plain)]
            halves = [
                each(ours, lambda step, half=half, choice=choice: step.half(half, getattr(choice, half)))
                for half in HALVES
            ]
            times.append(f"{num_tokens}: {took[0]:.1f} ({halves[0]:.1f} + {halves[1]:.1f}) for {took[1]:.1f}")
        print(f"{name:8} {', '.join(times)}", flush=True)


def coded_experts(codes: WeightFormat, group: int) -> CodedExpertWeights:
    experts = CodedExpertWeights(SHAPE, torch.bfloat16, torch.device("cuda"))
    for half in HALVES:
        out_features, in_features = SHAPE.matrix(half)
        columns = in_features // (2 if codes == W4 else 1)
        for expert in range(SHAPE.num_experts):
            scales = torch.rand(out_features, in_features // group if group else 1, device="cuda") / 100
            weight = torch.randint(120, (out_features, columns), device="cuda", dtype=torch.uint8)
            weight = weight.view(torch.float8_e4m3fn) if codes == FP8 else weight
            experts.fill(half, expert, StoredWeight(codes, {"weight": weight, "scales": scales}))
    return experts


def candidates(num_tokens: int) -> Iterator[ProductTiles]:
    per_expert = num_tokens * ROUTING.top_k / SHAPE.num_experts
    if per_expert <= 16:
        for columns, depth, warps in (
            (32, 128, 4),
            (32, 256, 2),
            (32, 256, 4),
            (64, 64, 4),
            (64, 128, 4),
            (128, 64, 4),
        ):
            yield from (ProductTiles(16, columns, depth, warps, stages) for stages in (3, 5))
    if 4 <= per_expert <= 64:
        yield from (ProductTiles(32, columns, depth, 4, 4) for columns in (64, 128) for depth in (64, 128))
        yield from (ProductTiles(64, columns, 64, 4, stages) for columns in (64, 128) for stages in (3, 4))
    if per_expert >= 32:
        yield from (ProductTiles(128, columns, 64, 8, stages) for columns in (64, 128, 256) for stages in (3, 4))


def try_tiles(counts: list[int], layers: Sequence[GroupedExpertWeights]) -> None:
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


def compile_all(counts: list[int], layers: Sequence[GroupedExpertWeights], *, tiles: bool) -> None:
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
    counts = [int(word) for word in sys.argv[1:] if word.isdecimal()] or [1, 2, 4, 8, 32, 128, 256, 2048, 8192]
    layers = [TritonExpertWeights(SHAPE, torch.bfloat16, torch.device("cuda")) for _ in range(LAYERS)]
    for layer in layers:
        for weight in layer.weights.values():
            weight.normal_(std=0.02)
    if "coded" in sys.argv[1:] and not tiles:
        coded(counts, layers)
        return
    if tiles and "coded" in sys.argv[1:]:  # of fp8, a scale a row
        filled = [coded_experts(FP8, 0) for _ in range(LAYERS)]
        compile_all(counts, filled, tiles=True)
        try_tiles(counts, filled)
        return
    compile_all(counts, layers, tiles=tiles)
    if tiles:
        try_tiles(counts, layers)
    table(counts, layers)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
