"""Speed of the native ops beside torch's, in one run: `python -m tests.benches.ops.native [linear attention small step]`.

By hand only; pytest does not collect it. Weights are cycled through copies larger than any cache share, as in a model.
A time is the 20th percentile of many calls, ours and torch's taken in turns, so that another process's bursts hit both."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import oneloop_native
import torch
from torch import Tensor
from torch.nn import functional

import ops

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, INNER, VOCAB = 30, 9, 3, 64, 576, 1536, 49152  # SmolLM2-135M
BUDGET_S, TURN_S, SETTLE_S = 0.6, 0.1, 0.02


def measure(threads: int, **ways: Callable[[], object]) -> dict[str, float]:
    """Seconds per call of each way; each runs under the thread settings it would have in a server.

    The ways take turns of `TURN_S`. What a turn measures first is thrown away: torch's OpenMP threads go on spinning for
    some milliseconds after their last call."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + BUDGET_S * len(ways)
    while time.perf_counter() < end or any(len(times) < 3 for times in samples.values()):
        for name, call in ways.items():
            torch.set_num_threads(threads if name == "torch" else 1)
            turn = time.perf_counter()
            counted = 0
            while counted == 0 or time.perf_counter() < turn + TURN_S:
                start = time.perf_counter()
                call()
                if start > turn + SETTLE_S:
                    samples[name].append(time.perf_counter() - start)
                    counted += 1
    return {name: sorted(times)[len(times) // 5] for name, times in samples.items()}


def cycle(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Each call runs the next of `calls`."""
    following = itertools.cycle(calls)
    return lambda: next(following)()


def bench_linear(threads: int) -> None:
    print(
        f"{'N':>6} {'K':>5} {'M':>4} {'ours us':>9} {'GB/s':>6} {'GF/s':>5} {'torch us':>9} {'GB/s':>6} {'GF/s':>5} ratio"
    )
    for n, k, copies in [(960, 576, 60), (576, 576, 60), (3072, 576, 30), (576, 1536, 30), (VOCAB, 576, 1)]:
        weights = [torch.randn(n, k) for _ in range(copies)]
        packed = [ops.prepare_linear(ops.StoredWeight.dense(weight)) for weight in weights]
        for m in (1, 4, 8, 16, 32, 64, 128, 512):
            if n == VOCAB and m > 32:
                continue
            x = torch.randn(m, k)
            took = measure(
                threads,
                ours=cycle([partial(ops.linear, x, w) for w in packed]),
                torch=cycle([partial(functional.linear, x, w) for w in weights]),
            )
            columns = [
                f"{s * 1e6:9.0f} {n * k * 4 / s / 1e9:6.1f} {2 * m * n * k / s / 1e9:5.0f}" for s in took.values()
            ]
            print(f"{n:6} {k:5} {m:4} {columns[0]} {columns[1]} {took['torch'] / took['ours']:5.2f}", flush=True)


def paged(rows: list[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, Tensor, ops.AttentionMeta]:
    """Caches and meta for rows of (context, queries), blocks of 16."""
    needed = [-(-context // 16) for context, _ in rows]
    k_cache, v_cache = (torch.randn(sum(needed), KV_HEADS, 16, HEAD_SIZE).to(dtype) for _ in range(2))
    order = torch.randperm(sum(needed), dtype=torch.int32).split(needed)
    tables = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    for row, blocks in enumerate(order):
        tables[row, : len(blocks)] = blocks
    queries = torch.tensor([0, *(count for _, count in rows)])
    lens = torch.tensor([context for context, _ in rows], dtype=torch.int32)
    meta = ops.AttentionMeta(queries.cumsum(0).int(), lens, tables, int(queries.max()), int(lens.max()))
    return k_cache, v_cache, meta


def bench_attention(threads: int) -> None:
    print("attention, 9 heads of 64 over 3 kv heads; torch: SDPA over the same context, contiguous")
    attend = functional.scaled_dot_product_attention
    shapes = {
        "decode 1 x 200": [(200, 1)],
        "decode 16 x 200": [(200, 1)] * 16,
        "decode 1 x 4096": [(4096, 1)],
        "decode 16 x 2048": [(2048, 1)] * 16,
        "prefill 512": [(512, 512)],
        "prefill 512 at 4096": [(4096, 512)],
        "prefill 4096": [(4096, 4096)],
    }
    for name, rows in shapes.items():
        for dtype in (torch.float32, torch.bfloat16):
            k_cache, v_cache, meta = paged(rows, dtype)
            context, count = rows[0]
            q = torch.randn(len(rows) * count, HEADS, HEAD_SIZE)
            dense_q = torch.randn(len(rows), HEADS, count, HEAD_SIZE)
            dense_k, dense_v = (torch.randn(len(rows), KV_HEADS, context, HEAD_SIZE) for _ in range(2))
            mask = torch.ones(count, context).tril(context - count).bool() if count > 1 else None
            took = measure(
                threads,
                ours=partial(ops.paged_attention, q, k_cache, v_cache, meta, 0.125),
                torch=partial(attend, dense_q, dense_k, dense_v, attn_mask=mask, enable_gqa=True),
            )
            pairs = sum(count * context - count * (count - 1) // 2 for context, count in rows)
            flops, read = 4 * pairs * HEADS * HEAD_SIZE, sum(c for c, _ in rows) * KV_HEADS * HEAD_SIZE * 2
            ours = took["ours"]
            print(
                f"{name:20} {str(dtype)[6:]:9} {ours * 1e6:9.0f} us {flops / ours / 1e9:6.1f} GF/s "
                f"{read * k_cache.element_size() / ours / 1e9:6.1f} GB/s   torch f32 {took['torch'] * 1e6:9.0f} us",
                flush=True,
            )


def turns(positions: int) -> Tensor:
    angles = torch.arange(positions)[:, None] * 10000 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    return torch.cat([angles.cos(), angles.sin()], 1)


def bench_small(threads: int) -> None:
    print("one call, all in; torch: the reference")
    for tokens in (1, 16, 512):
        x, residual, weight = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN), torch.randn(HIDDEN)
        qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_SIZE)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        positions, cos_sin, slots = torch.arange(tokens), turns(2048), torch.arange(tokens)
        k_cache, v_cache = (torch.zeros(64, KV_HEADS, 16, HEAD_SIZE) for _ in range(2))
        gate_up = torch.randn(tokens, 2 * INNER)
        small = ops.prepare_linear(ops.StoredWeight.dense(torch.randn(16, 8)))
        x8 = torch.randn(tokens, 8)
        calls: dict[str, Callable[[], object]] = {
            "rms_norm": lambda x=x, w=weight: ops.rms_norm(x, w, 1e-5),
            "add_rms_norm": lambda x=x, r=residual, w=weight: ops.add_rms_norm(x, r, w, 1e-5),
            "rope": lambda q=q, k=k, p=positions, c=cos_sin: ops.rope(q, k, p, c),
            "store_kv": lambda k=k, v=v, a=k_cache, b=v_cache, s=slots: ops.store_kv(k, v, a, b, s),
            "silu_mul": lambda g=gate_up: ops.silu_mul(g),
            "linear 16x8": lambda x=x8, w=small: ops.linear(x, w),
            "torch.empty": lambda t=tokens: torch.empty(t, HIDDEN),
        }
        for name, call in calls.items():
            print(f"T={tokens:4} {name:14} {measure(threads, ours=call)['ours'] * 1e6:8.2f} us", flush=True)


class Layer:
    def __init__(self, pack: Callable[[Tensor], object]) -> None:
        self.norms = [torch.ones(HIDDEN) for _ in range(2)]
        shapes = [((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
        self.qkv, self.o, self.gate_up, self.down = (pack(torch.randn(n, k) * 0.05) for n, k in shapes)


def our_step(layers: list[Layer], head: ops.LinearWeight, batch: int, context: int) -> Callable[[], object]:
    k_cache, v_cache, meta = paged([(context, 1)] * batch, torch.float32)
    caches = [(k_cache.clone(), v_cache.clone()) for _ in layers]
    x, positions = torch.randn(batch, HIDDEN), torch.full((batch,), context - 1)
    slots = (meta.block_tables[:, (context - 1) // 16] * 16 + (context - 1) % 16).long()
    cos_sin, final = turns(2048), torch.ones(HIDDEN)

    def step() -> Tensor:
        residual = x.clone()
        hidden = ops.rms_norm(residual, final, 1e-5)
        for layer, (keys, values) in zip(layers, caches, strict=True):
            qkv = ops.linear(hidden, layer.qkv).view(batch, -1, HEAD_SIZE)
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            ops.rope(q, k, positions, cos_sin)
            ops.store_kv(k, v, keys, values, slots)
            mixed = ops.paged_attention(q, keys, values, meta, 0.125)
            hidden = ops.add_rms_norm(ops.linear(mixed.view(batch, -1), layer.o), residual, layer.norms[0], 1e-5)
            out = ops.linear(ops.silu_mul(ops.linear(hidden, layer.gate_up)), layer.down)
            hidden = ops.add_rms_norm(out, residual, layer.norms[1], 1e-5)
        return ops.linear(hidden, head)

    return step


def torch_step(layers: list[Layer], head: Tensor, batch: int, context: int) -> Callable[[], object]:
    """The same arithmetic in eager torch over a contiguous cache, without rope and cache writes."""
    caches = [tuple(torch.randn(batch, KV_HEADS, context, HEAD_SIZE) for _ in range(2)) for _ in layers]
    x, final = torch.randn(batch, HIDDEN), torch.ones(HIDDEN)

    def step() -> Tensor:
        residual = x
        hidden = functional.rms_norm(residual, (HIDDEN,), final)
        for layer, (keys, values) in zip(layers, caches, strict=True):
            qkv = functional.linear(hidden, layer.qkv).view(batch, -1, HEAD_SIZE)
            q = qkv[:, :HEADS].unsqueeze(2)
            mixed = functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            residual = residual + functional.linear(mixed.reshape(batch, -1), layer.o)
            hidden = functional.rms_norm(residual, (HIDDEN,), layer.norms[0])
            gate, up = functional.linear(hidden, layer.gate_up).chunk(2, dim=-1)
            residual = residual + functional.linear(functional.silu(gate) * up, layer.down)
            hidden = functional.rms_norm(residual, (HIDDEN,), layer.norms[1])
        return functional.linear(hidden, head)

    return step


def bench_step(threads: int) -> None:
    head = torch.randn(VOCAB, HIDDEN) * 0.05
    ours, theirs = (
        [Layer(lambda w: ops.prepare_linear(ops.StoredWeight.dense(w))) for _ in range(LAYERS)],
        [Layer(lambda w: w) for _ in range(LAYERS)],
    )
    packed_head = ops.prepare_linear(ops.StoredWeight.dense(head))
    for batch in (1, 4, 16, 32):
        took = measure(
            threads,
            ours=our_step(ours, packed_head, batch, 200),
            torch=torch_step(theirs, head, batch, 200),
        )
        print(
            f"step, batch {batch:2}, context 200: ours {took['ours'] * 1e3:6.1f} ms ({0.538 / took['ours']:5.1f} GB/s "
            f"of weights), torch {took['torch'] * 1e3:6.1f} ms",
            flush=True,
        )


def main() -> None:
    benches = {"small": bench_small, "linear": bench_linear, "attention": bench_attention, "step": bench_step}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help=f"any of {', '.join(benches)}; all when left out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=oneloop_native.isas()[0], choices=oneloop_native.isas())
    args = parser.parse_args()
    oneloop_native.set_isa(args.isa)
    ops.set_num_threads(args.threads)
    print(f"{args.threads} threads, {args.isa}, torch {torch.__version__}")
    with torch.inference_mode():
        for name in args.what or benches:
            benches[name](args.threads)


if __name__ == "__main__":
    main()
