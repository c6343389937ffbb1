"""The CUDA kernels against their alternatives, over real shapes: `python -m tests.benches.ops.cuda [linear] [decode]`.

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
from ops.gemm.few_rows import MAX_ROWS as MAX_FEW_ROWS
from ops.gemm.few_rows import few_rows
from ops.gemm.tiled import MAX_ROWS, tiled
from ops.kv.eight_bits import FP8, to_int8_entries

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


def bench_decode() -> None:
    rng = random.Random(1)
    for num_heads, num_kv_heads, size in ((16, 8, 128), (32, 8, 128)):
        for lines in (1, 8, 32, 64, 128, 256):
            mixed = sorted((rng.randint(100, 1024) + rng.randint(0, 1024) for _ in range(lines)), reverse=True)
            cases = [("576", [576] * lines), ("mixed", mixed)]
            for name, contexts, kept in ((*case, kept) for case in cases for kept in (torch.bfloat16, FP8, torch.int8)):
                steps = [_decode_step(contexts, num_heads, num_kv_heads, size, kept) for _ in range(4)]
                out = torch.empty(lines, num_heads, size, device="cuda", dtype=torch.bfloat16)

                def work(steps=steps, out=out) -> None:
                    for qkv, heads, keys, values, meta in steps:
                        cuda.decode(qkv, heads, keys, values, meta, out, fused=True)

                floor = sum(contexts) * num_kv_heads * steps[0][2].shape[-1] * 2 * kept.itemsize / COPY_BYTES_PER_US
                print(
                    f"{num_heads} heads, {lines:3} lines of {name:5}, {str(kept)[6:14]}: {us(work, 4):6.1f}, floor {floor:6.1f}",
                    flush=True,
                )


def _decode_step(contexts: list[int], num_heads: int, num_kv_heads: int, size: int, kept: torch.dtype):
    lines, width = len(contexts), -(-max(contexts) // 16)
    tables = torch.randperm(lines * width, device="cuda").int().view(lines, width)
    drawn = [torch.randn(lines * width, num_kv_heads, 16, size, device="cuda") for _ in "kv"]
    caches = [to_int8_entries(cache) if kept == torch.int8 else cache.to(kept) for cache in drawn]
    weights = tuple(torch.rand(size, device="cuda").bfloat16() for _ in "qk")
    cos_sin = torch.rand(max(contexts) + 1, size, device="cuda")
    heads = AttentionHeads(num_heads, num_kv_heads, size, size**-0.5, cos_sin, weights, 1e-6)
    lens = torch.tensor(contexts, device="cuda", dtype=torch.int32)
    starts = torch.arange(lines + 1, device="cuda", dtype=torch.int32)
    qkv = torch.randn(lines, (num_heads + 2 * num_kv_heads) * size, device="cuda").bfloat16()
    return qkv, heads, *caches, AttentionMeta(starts, lens, tables, 1, max(contexts), uniform=True)


if __name__ == "__main__":
    wanted = set(sys.argv[1:]) or {"linear", "decode"}
    if "linear" in wanted:
        bench_linear()
    if "decode" in wanted:
        bench_decode()
