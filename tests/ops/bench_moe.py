"""Mixture of experts on a GPU, by its parts and by tiles: `python tests/ops/bench_moe.py [tokens ...]`.

The shape of Qwen3-30B-A3B. Each time is one of several calls in a graph, with other routings and other layers' weights in turn, so
that no cache holds them. Floors: the bytes of the experts that are hit at the speed of a copy, the products at the speed of the
tensor cores. The last lines are the best tiles by tokens, as they stand in ops/moe/triton_experts.py, and all of `ops.moe`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch

import ops
from ops.moe.triton_experts import Tiles, TritonExpertWeights, product
from ops.moe.triton_route import Routed, route
from ops.moe.weights import Half
from tests.ops.bench_cuda import COPY_BYTES_PER_US, us

SHAPE = ops.ExpertShape(128, 2048, 768)
ROUTING = ops.Routing(8, renormalize=True)
FLOP_PER_US = 8e8  # what large dense products reach on an H200 in bfloat16
LAYERS, STEPS = 2, 8
SHOWN = 6  # of the best tiles
HALVES: tuple[Half, Half] = ("gate_up", "down")


class Step(NamedTuple):
    experts: TritonExpertWeights
    x: torch.Tensor
    inner: torch.Tensor
    logits: torch.Tensor
    routed: Routed


def candidates(num_tokens: int) -> Iterator[Tiles]:
    per_expert = num_tokens * ROUTING.top_k / SHAPE.num_experts
    if per_expert <= 16:
        for columns in (16, 32, 64, 128):
            for depth in (64, 128, 256):
                for stages in (3, 5):
                    for warps in (2, 4) if columns < 64 else (4, 8):
                        if columns * depth <= 8192:
                            yield Tiles(16, columns, depth, warps, stages)
    if 4 <= per_expert <= 64:
        yield from (Tiles(32, columns, depth, 4, 4) for columns in (32, 64, 128) for depth in (64, 128))
    if per_expert >= 8:
        yield from (
            Tiles(64, columns, 64, warps, stages)
            for columns, warps in ((64, 4), (128, 4), (128, 8))
            for stages in (3, 4)
        )
    if per_expert >= 32:
        yield from (Tiles(128, columns, 64, 8, stages) for columns in (64, 128, 256) for stages in (3, 4))
        yield from (Tiles(128, 128, 128, 8, 2), Tiles(128, 64, 64, 4, 4))


def steps_of(num_tokens: int, layers: list[TritonExpertWeights]) -> list[Step]:
    steps = []
    for step in range(STEPS):
        x = torch.randn(num_tokens, SHAPE.hidden_size, device="cuda").bfloat16()
        logits = torch.randn(num_tokens, SHAPE.num_experts, device="cuda").bfloat16()
        inner = torch.randn(num_tokens * ROUTING.top_k, SHAPE.intermediate_size, device="cuda").bfloat16()
        steps.append(Step(layers[step % LAYERS], x, inner, logits, route(logits, ROUTING)))
    return steps


def run(half: Half, step: Step, tiles: Tiles) -> None:
    product(step.experts, half, step.x if half == "gate_up" else step.inner, step.routed, tiles)


def each(steps: list[Step], call: Callable[[Step], object]) -> float:
    def work() -> None:
        for step in steps:
            call(step)

    return us(work, len(steps))


def floor(half: Half, steps: list[Step]) -> tuple[float, float]:
    """Bytes and operations of an average step."""
    out_features, in_features = SHAPE.matrix(half)
    hit = sum(int((step.routed.starts.diff() > 0).sum()) for step in steps) / len(steps)
    return hit * out_features * in_features * 2, 2 * steps[0].inner.shape[0] * out_features * in_features


def compile_all(layers: list[TritonExpertWeights], counts: list[int]) -> None:
    step = steps_of(1, layers)[0]
    wanted = {(half, tiles) for count in counts for tiles in candidates(count) for half in HALVES}

    def compile_one(half: Half, tiles: Tiles) -> None:
        with suppress(Exception):  # too large for the device: said where it is measured
            run(half, step, tiles)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda pair: compile_one(*pair), sorted(wanted)))
    torch.cuda.synchronize()
    print(f"{len(wanted)} kernels compiled", flush=True)


def bench(num_tokens: int, layers: list[TritonExpertWeights]) -> str:
    steps = steps_of(num_tokens, layers)
    best: list[Tiles] = []
    for half in HALVES:
        num_bytes, operations = floor(half, steps)
        least = max(num_bytes / COPY_BYTES_PER_US, operations / FLOP_PER_US)
        times: dict[Tiles, float] = {}
        for tiles in candidates(num_tokens):
            try:
                times[tiles] = each(steps, lambda step, half=half, tiles=tiles: run(half, step, tiles))
            except Exception as error:
                print(f"  {tiles}: {type(error).__name__} {str(error)[:80]}")
                torch.cuda.synchronize()
        ranked = sorted(times, key=times.__getitem__)
        best.append(ranked[0])
        print(f"{num_tokens} tokens, {half}: floor {least:.1f} us", flush=True)
        for tiles in ranked[:SHOWN]:
            took = times[tiles]
            rates = f"{num_bytes / took / 1e6:5.2f} TB/s {operations / took / 1e6:6.1f} TFLOP/s"
            print(f"  {took:8.1f} us {rates}  {tuple(tiles)}", flush=True)
    routing = each(steps, lambda step: route(step.logits, ROUTING))
    whole = each(steps, lambda step: ops.moe(step.x, step.logits, step.experts, ROUTING))
    total = [sum(part) for part in zip(*(floor(half, steps) for half in HALVES), strict=True)]
    least = max(total[0] / COPY_BYTES_PER_US, total[1] / FLOP_PER_US)
    per_expert = num_tokens * ROUTING.top_k / SHAPE.num_experts
    return (
        f"{num_tokens:5} tokens: routing {routing:6.1f} us, ops.moe as it is {whole:8.1f} us, floor {least:8.1f} us; "
        f"best: Choice({per_expert:g}, Tiles{tuple(best[0])}, Tiles{tuple(best[1])})"
    )


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or [1, 8, 32, 128, 256, 2048, 8192]
    layers = [TritonExpertWeights(SHAPE, torch.bfloat16, torch.device("cuda")) for _ in range(LAYERS)]
    for layer in layers:
        for weight in layer.weights.values():
            weight.normal_(std=0.02)
    compile_all(layers, counts)
    lines = [bench(count, layers) for count in counts]
    print("\n".join(lines))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
