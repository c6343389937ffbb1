"""Prompts' attention on one GPU: TFLOP/s of prefill.cu, of the Triton kernel and of torch's cuDNN attention, on the same step, and
of the first two where the cache is of fp8, the first also with all of it widened before.

python -m tests.benches.ops.prefill [head size ...] [step ...]"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from ops import tuning
from ops.attention import prefill, triton_paged, triton_widened
from ops.kv.eight_bits import to_fp8
from tests.ops.test_cuda_prefill import step

HEADS = [(16, 8, 128), (32, 8, 128), (16, 8, 64), (8, 4, 256)]  # query, kv, size
STEPS = {  # (queries, context) of each row
    "8 x 8192": [(8192, 8192)] * 8,
    "1 x 8192": [(8192, 8192)],
    "64 x 512": [(512, 512)] * 64,
    "1 x 128": [(128, 128)],
    "1 x 1000": [(1000, 1000)],
    "16 x 256": [(256, 256)] * 16,
    "1000 to 4000": [(1000 + 61 * i % 3000,) * 2 for i in range(16)],
    "chunks": [(2048, 10240), (512, 4096), (2048, 6000)],
    "16 of 2000": [(16, 2000)] * 64,
    "48 of 2000": [(48, 2000)] * 32,
    "96 of 2000": [(96, 2000)] * 32,
    "40 of 40": [(40, 40)] * 64,
    "96 of 96": [(96, 96)] * 32,
}


def flops(rows: list[tuple[int, int]], num_heads: int, size: int) -> float:
    return sum(4 * num_heads * size * (queries * context - queries * (queries - 1) / 2) for queries, context in rows)


def row_of(rows: list[tuple[int, int]], num_heads: int, num_kv_heads: int, size: int) -> str:
    """Rates of the three, the time of the first, and rates over fp8: of the first, also with that widened, and of Triton."""
    qkv, heads, (k_cache, v_cache), meta = step(rows, num_heads, num_kv_heads, size, torch.bfloat16)
    qkv.normal_()
    out = torch.empty(qkv.shape[0], num_heads, size, dtype=qkv.dtype, device="cuda")
    q = heads.split(qkv)[0]
    work = flops(rows, num_heads, size) / 1e9

    def ms(run: Callable[[], object]) -> float:
        return float(do_bench(run, return_mode="median"))

    own = ms(lambda: prefill.prefill(qkv, heads, k_cache, v_cache, meta, out, 2))
    triton = ms(lambda: triton_paged.paged_attention(q, k_cache, v_cache, meta, heads.scale, out=out))
    cudnn = float("nan")
    if len(set(rows)) == 1 and rows[0][0] == rows[0][1]:
        parts = qkv.view(len(rows), rows[0][0], -1, size).transpose(1, 2)
        qkv_parts = parts.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            cudnn = ms(lambda: scaled_dot_product_attention(*qkv_parts, is_causal=True, enable_gqa=True))
    codes = [to_fp8(cache, 1.0) for cache in (k_cache, v_cache)]
    coded = ms(lambda: prefill.prefill(qkv, heads, *codes, meta, out, 2))
    num_pages = sum(-(-context // prefill.PAGE) for _, context in rows)
    num_programs = triton_widened.PROGRAMS * tuning.of(qkv.device).multiprocessors

    def widened_before() -> None:
        widened = triton_widened.widen(*codes, meta, qkv.dtype, 2, num_pages, num_programs)
        prefill.prefill(qkv, heads, *codes, meta, out, 2, widened)

    widened = ms(widened_before)
    coded_triton = ms(lambda: triton_paged.paged_attention(q, *codes, meta, heads.scale, out=out))
    rates = " ".join(f"{work / each:8.1f}" for each in (own, triton, cudnn))
    return f"{rates} {own * 1000:9.1f} {work / coded:8.1f} {work / widened:8.1f} {work / coded_triton:8.1f}"


def main() -> None:
    words = set(sys.argv[1:])
    steps = words & STEPS.keys()
    sizes = {int(size) for size in words - steps} or {size for *_, size in HEADS}
    print(
        f"{'heads':>14} {'step':>14} {'ours':>8} {'triton':>8} {'cudnn':>8}  TFLOP/s, us of ours; of fp8 ours, widened, triton"
    )
    for shape in HEADS:
        for name, rows in STEPS.items():
            if shape[-1] in sizes and (not steps or name in steps):
                print(f"{shape!s:>14} {name:>14} {row_of(rows, *shape)}", flush=True)


if __name__ == "__main__":
    main()
