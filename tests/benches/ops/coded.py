"""Linear layers in codes and scales beside those in bfloat16, of the 8B shape: `python -m tests.benches.ops.coded [served] [tiles]
[rounded] [streams] [rows ...]`.

`served`: as `ops.linear` and `ops.gated_linear` go, each scheme, and the sum of a layer; `tiles`, `rounded` and `streams`: every
instance of tiled_w4.cu, tiled_fp8.cu and few_rows_coded.cu, the best of each shape and what is chosen. As in cuda.py a time
is that of one of many copies in a graph, in microseconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

import ops
from ops.gemm import few_rows_coded, tiled_fp8, tiled_w4
from ops.gemm.coded import RowsLinearWeight, TiledLinearWeight, prepare
from ops.gemm.cuda import CudaLinearWeight
from ops.gemm.triton_round import round_rows
from ops.gemm.weight import LinearWeight
from ops.stored import FP8, W4, StoredWeight, WeightFormat
from tests.benches.ops.cuda import COPY_BYTES_PER_US, SHAPES, us

LAYER = SHAPES["8b"][:4]
GATED = (28672, 4096)
ROWS = (1, 16, 32, 64, 128, 256)
SCHEMES: dict[str, tuple[WeightFormat | None, int]] = {
    "bf16": (None, 0),
    "fp8": (FP8, 0),
    "fp8/128": (FP8, 128),
    "w4/128": (W4, 128),
}
SHOWN = 4
T = TypeVar("T")
_random = torch.Generator("cuda").manual_seed(0) if torch.cuda.is_available() else None


def drawn(codes: WeightFormat | None, group: int, out_features: int, in_features: int) -> StoredWeight:
    if codes is None:
        return StoredWeight.dense(torch.randn(out_features, in_features, device="cuda", generator=_random).bfloat16())
    scales = torch.rand(out_features, in_features // group if group else 1, device="cuda", generator=_random) / 100
    columns = in_features // (2 if codes == W4 else 1)
    weight = torch.randint(120, (out_features, columns), device="cuda", generator=_random, dtype=torch.uint8)
    weight = weight.view(torch.float8_e4m3fn) if codes == FP8 else weight
    return StoredWeight(codes, {"weight": weight, "scales": scales})


def copies_of(make: Callable[[StoredWeight], T], scheme: str, out_features: int, in_features: int) -> list[T]:
    """As many as no cache holds."""
    codes, group = SCHEMES[scheme]
    num_bytes = out_features * in_features * (2 if codes is None else 1 if codes == FP8 else 0.5)
    copies = max(2, min(24, int(4e8 / num_bytes)))
    return [make(drawn(codes, group, out_features, in_features)) for _ in range(copies)]


def x_of(num_rows: int, in_features: int) -> Tensor:
    return torch.randn(num_rows, in_features, device="cuda", generator=_random).bfloat16()


def each(weights: Sequence[T], call: Callable[[T], object]) -> float:
    def work() -> None:
        for weight in weights:
            call(weight)

    return us(work, len(weights))


def bench_served(counts: Sequence[int]) -> None:
    totals = {(scheme, count): 0.0 for scheme in SCHEMES for count in counts}
    for out_features, in_features in LAYER:
        for scheme in SCHEMES:
            make = CudaLinearWeight if scheme == "bf16" else prepare
            weights: list[LinearWeight] = copies_of(make, scheme, out_features, in_features)
            times = []
            for count in counts:
                x = x_of(count, in_features)
                run = ops.gated_linear if (out_features, in_features) == GATED else ops.linear
                time = each(weights, lambda weight, x=x, run=run: run(x, weight))
                totals[scheme, count] += time
                times.append(f"{count}: {time:6.1f}")
            print(f"{scheme:8} {out_features} x {in_features}  {'  '.join(times)}", flush=True)
    for scheme in SCHEMES:
        times = "  ".join(f"{count}: {totals[scheme, count]:6.1f}" for count in counts)
        print(f"{scheme:8} a layer       {times}", flush=True)
    rounds = [(count, each([x_of(count, 4096)] * 8, lambda x: round_rows(x, FP8))) for count in counts if count > 16]
    print(f"rounding of 4096 columns {'  '.join(f'{count}: {time:.1f}' for count, time in rounds)}", flush=True)


def bench_tiles(counts: Sequence[int]) -> None:
    for out_features, in_features in LAYER:
        gated = (out_features, in_features) == GATED
        weights: list[TiledLinearWeight] = copies_of(TiledLinearWeight, "w4/128", out_features, in_features)
        floor = out_features * in_features * (0.5 + 4 / 128) / COPY_BYTES_PER_US
        for count in counts:
            x = x_of(count, in_features)
            chosen, chosen_splits = tiled_w4.choose(count, in_features, out_features, 1, gated, 132)
            sizes = {chosen.rows} if count < 128 else {128, 256}
            known = [tile for tile in tiled_w4.tiles(1, gated) if tile.rows in sizes]
            tiled_w4.program().compile_ahead(
                [tile.name("tiled_w4") for tile in known], torch.bfloat16, torch.device("cuda", 0)
            )
            times = {}
            for tile in known:
                for splits in (1, 2, 4, 8):
                    blocks = -(-out_features // (64 * tile.wgs)) * -(-count // tile.rows) * splits
                    if splits > 1 and blocks > 2 * 132 * tile.blocks:
                        continue
                    times[tile.rows, tile.wgs, tile.blocks, int(tile.scaled), splits] = each(
                        weights,
                        lambda weight, tile=tile, splits=splits, x=x, gated=gated: weight.in_tiles(
                            x, gated=gated, tile=tile, splits=splits
                        ),
                    )
            now = times.get((chosen.rows, chosen.wgs, chosen.blocks, int(chosen.scaled), chosen_splits), float("nan"))
            best = sorted(times, key=times.__getitem__)[:SHOWN]
            found = ", ".join(f"{times[how]:.1f} {'/'.join(map(str, how))}" for how in best)
            widened = f"; widened {each(weights, lambda weight, x=x: weight.by_widened(x)):.1f}" if count >= 128 else ""
            print(
                f"{out_features} x {in_features} {count:3}: floor {floor:.1f}, now {now:.1f}; {found}{widened}",
                flush=True,
            )
    print("rows of x / warpgroups / blocks / scaled / splits")


def bench_rounded(counts: Sequence[int]) -> None:
    """x rounded, and the product; beside it what cuBLAS and Triton take, with the activation behind."""
    for scheme in ("fp8", "fp8/128"):
        grouped = "/" in scheme
        for out_features, in_features in LAYER:
            gated = (out_features, in_features) == GATED
            weights: list[RowsLinearWeight] = copies_of(RowsLinearWeight, scheme, out_features, in_features)
            for count in (count for count in counts if count > few_rows_coded.MAX_ROWS):
                x = x_of(count, in_features)
                chosen, chosen_splits = tiled_fp8.choose(count, in_features, out_features, grouped, gated, 132)
                most = 256 if count > 128 else 128 if count > 64 else 64 if count > 32 else 32
                known = [tile for tile in tiled_fp8.tiles(grouped, gated) if most // 4 <= tile.rows <= most]
                names = [tile.name for tile in known]
                tiled_fp8.program().compile_ahead(names, torch.bfloat16, torch.device("cuda", 0))
                times = {}
                for tile in known:
                    for splits in (1, 2, 4):
                        blocks = -(-out_features // (64 * tile.wgs)) * -(-count // tile.rows) * splits
                        if splits > 1 and blocks > 2 * 132 * tile.blocks:
                            continue
                        times[tile.rows, tile.wgs, tile.blocks, splits] = each(
                            weights,
                            lambda weight, tile=tile, splits=splits, x=x, gated=gated: weight.in_tiles(
                                x, gated=gated, tile=tile, splits=splits
                            ),
                        )
                now = times.get((chosen.rows, chosen.wgs, chosen.blocks, chosen_splits), float("nan"))
                best = sorted(times, key=times.__getitem__)[:SHOWN]
                found = ", ".join(f"{times[how]:.1f} {'/'.join(map(str, how))}" for how in best)

                def other(weight: RowsLinearWeight, x: Tensor = x, gated: bool = gated) -> Tensor:
                    out = weight.by_cublas(x) if weight.groups == 1 else weight.by_triton(x)
                    return ops.silu_mul(out) if gated else out

                otherwise = each(weights, other)
                print(
                    f"{scheme} {out_features} x {in_features} {count:3}: otherwise {otherwise:.1f}, now {now:.1f}; {found}",
                    flush=True,
                )
    print("rows of x / warpgroups / blocks / splits")


def bench_streams(counts: Sequence[int]) -> None:
    for scheme in ("fp8", "fp8/128", "w4/128"):
        codes = W4 if scheme == "w4/128" else FP8
        for out_features, in_features in LAYER:
            make = TiledLinearWeight if codes == W4 else RowsLinearWeight
            weights: list[TiledLinearWeight] | list[RowsLinearWeight] = copies_of(
                make, scheme, out_features, in_features
            )
            gated = (out_features, in_features) == GATED
            for count in (count for count in counts if count <= few_rows_coded.MAX_ROWS):
                x = x_of(count, in_features)
                segments = 1 if "/" in scheme else 0
                chosen = few_rows_coded.choose(codes, segments, count, in_features, out_features, gated)
                wanted = chosen.segments, chosen.tiles, chosen.gated
                same = [
                    each for each in few_rows_coded.variants(codes) if (each.segments, each.tiles, each.gated) == wanted
                ]
                names = [variant.name for variant in same]
                few_rows_coded.program(codes).compile_ahead(names, torch.bfloat16, torch.device("cuda", 0))
                times = {}
                for variant in same:
                    for blocks in (1, 2, 99):
                        how = {"gated": gated, "variant": variant, "max_blocks": blocks}
                        times[variant.warps, variant.batches, blocks] = each(
                            weights, lambda weight, how=how, x=x: weight.stream(x, **how)
                        )
                now = times[chosen.warps, chosen.batches, 99]
                best = sorted(times, key=times.__getitem__)[:SHOWN]
                found = ", ".join(f"{times[how]:.1f} {how}" for how in best)
                print(f"{scheme} {out_features} x {in_features} {count}: now {now:.1f}; {found}", flush=True)


def main() -> None:
    words = set(sys.argv[1:])
    counts = sorted(int(word) for word in words if word.isdecimal()) or list(ROWS)
    benches = {"served": bench_served, "tiles": bench_tiles, "rounded": bench_rounded, "streams": bench_streams}
    for name in [name for name in benches if name in words] or ["served"]:
        benches[name](counts)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
