"""The CUDA kernels against their alternatives, over real shapes: `python tests/ops/bench_cuda.py [linear] [coded] [streams]
[decode]`.

Each line is one pass over as many copies as a model has layers, in a graph, so that no cache holds a weight and launches cost
what they cost in service. Microseconds a layer; the floor is the bytes at the speed of a copy."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import torch
from torch.nn.functional import linear
from triton.testing import do_bench

from ops.attention import cuda
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.gemm import few_rows_coded
from ops.gemm.coded import CodedLinearWeight
from ops.gemm.few_rows import MAX_ROWS as MAX_FEW_ROWS
from ops.gemm.few_rows import few_rows
from ops.gemm.tiled import MAX_ROWS, tiled
from ops.stored import FP8, W4, StoredWeight, WeightFormat

COPY_BYTES_PER_US = 4.26e6
SHAPES = {  # out, in
    "0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    "8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
}


def us(work: Callable[[], None], count: int) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return float(do_bench(graph.replay, warmup=5, rep=20, return_mode="median")) / count * 1e3


def bench_linear() -> None:
    for model, shapes in SHAPES.items():
        for out_features, in_features in shapes:
            num_bytes = out_features * in_features * 2
            copies = max(2, min(28, int(8e8 / num_bytes)))
            weights = [torch.randn(out_features, in_features, device="cuda").bfloat16() for _ in range(copies)]
            for num_rows in (1, 8, MAX_FEW_ROWS, 32, 64, MAX_ROWS):
                x = torch.randn(num_rows, in_features, device="cuda").bfloat16()

                def streamed(x=x, weights=weights) -> None:
                    for weight in weights:
                        few_rows(x, weight, None, gated=False)

                def in_tiles(x=x, weights=weights) -> None:
                    for weight in weights:
                        tiled(x, weight, None, gated=False)

                def cublas(x=x, weights=weights) -> None:
                    for weight in weights:
                        linear(x, weight)

                stream = f"stream {us(streamed, copies):6.2f}, " if num_rows <= MAX_FEW_ROWS else ""
                print(
                    f"{model} {out_features} x {in_features}, {num_rows:3} rows: {stream}tiles {us(in_tiles, copies):6.2f}, "
                    f"cuBLAS {us(cublas, copies):6.2f}, floor {num_bytes / COPY_BYTES_PER_US:6.2f}",
                    flush=True,
                )


def bench_coded() -> None:
    """Weights in codes, by each way that coded.py could go."""
    random = torch.Generator("cuda").manual_seed(0)
    for codes, group in ((FP8, 0), (FP8, 128), (W4, 128)):
        for out_features, in_features in SHAPES["8b"][:4]:
            num_bytes = out_features * in_features // (2 if codes == W4 else 1)
            copies = max(2, min(28, int(6e8 / num_bytes)))
            groups = in_features // group if group else 1
            weights = [_coded(codes, out_features, in_features, groups, random) for _ in range(copies)]
            for num_rows in (1, 8, MAX_FEW_ROWS, 32, 128, 256, 2048):
                x = torch.randn(num_rows, in_features, device="cuda").bfloat16()
                ways = {"Triton": CodedLinearWeight.by_triton}
                if num_rows <= MAX_FEW_ROWS:
                    ways = {"stream": CodedLinearWeight.stream} | ways
                elif codes == W4:
                    ways["widened"] = CodedLinearWeight.by_widened
                else:
                    ways["rounded"] = CodedLinearWeight.by_rounded
                times = []
                for name, way in ways.items():

                    def work(x=x, weights=weights, way=way) -> None:
                        for weight in weights:
                            way(weight, x)

                    times.append(f"{name} {us(work, copies):6.2f}")
                print(
                    f"{codes} in groups of {group}, {out_features} x {in_features}, {num_rows:4} rows: {', '.join(times)}, "
                    f"floor {num_bytes / COPY_BYTES_PER_US:6.2f}",
                    flush=True,
                )


def bench_streams() -> None:
    """Every instance of few_rows_coded.cu; the best five of each shape, and what is chosen."""
    random = torch.Generator("cuda").manual_seed(0)
    for codes, group in ((FP8, 0), (FP8, 128), (W4, 128)):
        for out_features, in_features in SHAPES["8b"][:4]:
            num_bytes = out_features * in_features // (2 if codes == W4 else 1)
            copies = max(2, min(28, int(6e8 / num_bytes)))
            groups = in_features // group if group else 1
            weights = [_coded(codes, out_features, in_features, groups, random) for _ in range(copies)]
            gated = out_features == 28672
            for num_rows in (1, 16):
                x = torch.randn(num_rows, in_features, device="cuda").bfloat16()
                chosen = few_rows_coded.choose(codes, 1 if group else 0, num_rows, in_features, out_features, gated)
                times = {}
                same = [
                    each
                    for each in few_rows_coded.variants(codes)
                    if (each.segments, each.tiles, each.gated) == (chosen.segments, chosen.tiles, chosen.gated)
                ]
                names = [each.name for each in same]
                few_rows_coded.program(codes).compile_ahead(names, torch.bfloat16, torch.device("cuda", 0))
                for variant in same:
                    for blocks in (1, 2, 3, 99):
                        how = {"gated": gated, "variant": variant, "max_blocks": blocks}

                        def work(x=x, weights=weights, how=how) -> None:
                            for weight in weights:
                                weight.stream(x, **how)

                        times[variant.warps, variant.batches, blocks] = us(work, copies)
                best = ", ".join(
                    f"{how} {time:.2f}" for how, time in sorted(times.items(), key=lambda each: each[1])[:5]
                )
                now = times[chosen.warps, chosen.batches, 99]
                print(f"{codes}/{group} {out_features} x {in_features} {num_rows}: now {now:.2f}; {best}", flush=True)


def _coded(
    codes: WeightFormat, out_features: int, in_features: int, groups: int, random: torch.Generator
) -> CodedLinearWeight:
    scales = torch.rand(out_features, groups, device="cuda", generator=random) / 100
    columns = in_features // (2 if codes == W4 else 1)
    weight = torch.randint(120, (out_features, columns), device="cuda", generator=random, dtype=torch.uint8)
    weight = weight.view(torch.float8_e4m3fn) if codes == FP8 else weight
    return CodedLinearWeight(StoredWeight(codes, {"weight": weight, "scales": scales}))


def bench_decode() -> None:
    rng = random.Random(1)
    for num_heads, num_kv_heads, size in ((16, 8, 128), (32, 8, 128)):
        for lines in (1, 8, 32, 64, 128, 256):
            mixed = sorted((rng.randint(100, 1024) + rng.randint(0, 1024) for _ in range(lines)), reverse=True)
            for name, contexts in (("576", [576] * lines), ("mixed", mixed)):
                steps = [_decode_step(contexts, num_heads, num_kv_heads, size) for _ in range(4)]
                out = torch.empty(lines, num_heads, size, device="cuda", dtype=torch.bfloat16)

                def work(steps=steps, out=out) -> None:
                    for qkv, heads, keys, values, meta in steps:
                        cuda.decode(qkv, heads, keys, values, meta, out, fused=True)

                floor = sum(contexts) * num_kv_heads * size * 4 / COPY_BYTES_PER_US
                print(
                    f"{num_heads} heads, {lines:3} lines of {name:5}: {us(work, 4):6.1f}, floor {floor:6.1f}",
                    flush=True,
                )


def _decode_step(contexts: list[int], num_heads: int, num_kv_heads: int, size: int):
    lines, width = len(contexts), -(-max(contexts) // 16)
    tables = torch.randperm(lines * width, device="cuda").int().view(lines, width)
    caches = [torch.randn(lines * width, num_kv_heads, 16, size, device="cuda").bfloat16() for _ in "kv"]
    weights = tuple(torch.rand(size, device="cuda").bfloat16() for _ in "qk")
    cos_sin = torch.rand(max(contexts) + 1, size, device="cuda")
    heads = AttentionHeads(num_heads, num_kv_heads, size, size**-0.5, cos_sin, weights, 1e-6)
    lens = torch.tensor(contexts, device="cuda", dtype=torch.int32)
    starts = torch.arange(lines + 1, device="cuda", dtype=torch.int32)
    qkv = torch.randn(lines, (num_heads + 2 * num_kv_heads) * size, device="cuda").bfloat16()
    return qkv, heads, *caches, AttentionMeta(starts, lens, tables, 1, max(contexts), uniform=True)


if __name__ == "__main__":
    wanted = set(sys.argv[1:]) or {"linear", "coded", "decode"}
    if "linear" in wanted:
        bench_linear()
    if "coded" in wanted:
        bench_coded()
    if "streams" in wanted:
        bench_streams()
    if "decode" in wanted:
        bench_decode()
