"""Sums over two GPUs of this process beside NCCL's: microseconds, in a graph where they are small. And sums with the residual and
the RMS norm behind them, for rows of 4096, in one kernel beside two.

python -m tests.benches.ops.peers"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import torch
import torch.distributed as dist

import ops
from runtime.parallel.group import Group, HostRank
from runtime.platform.cuda_peers import CudaRank

SIZE, TIMES = 2, 20
ROWS = (1, 8, 32, 64, 128, 256, 512, 2048)
KIB = (8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)


def main() -> None:
    group, barrier, store = Group(SIZE), Barrier(SIZE), dist.HashStore()

    def rank(number: int) -> tuple[list[tuple[int, float, float]], list[tuple[int, float, float]]]:
        torch.cuda.set_device(number)
        host = HostRank(group, number)
        ours = host.within(group.claim(number), lambda: CudaRank(host))
        nccl = dist.ProcessGroupNCCL(store, number, SIZE)
        found = []
        for kib in KIB:
            x = torch.randn(kib * 512, device="cuda").bfloat16()
            barrier.wait()
            found.append((kib, timed(partial(ours.sum, x), barrier), timed(partial(_by_nccl, nccl, x), barrier)))
        return found, with_norms(ours, barrier)

    with ThreadPoolExecutor(SIZE) as pool:
        sums, normed = zip(*pool.map(rank, range(SIZE)), strict=True)
        for rows in zip(*sums, strict=True):
            kib, own, theirs = (max(each) for each in zip(*rows, strict=True))
            rates = [kib * 1024 / us / 1e3 for us in (own, theirs)]
            print(
                f"{kib:6} KiB: ours {own:8.1f} us ({rates[0]:6.1f} GB/s)   NCCL {theirs:8.1f} us ({rates[1]:6.1f} GB/s)",
                flush=True,
            )
        for rows in zip(*normed, strict=True):
            num, one, two = (max(each) for each in zip(*rows, strict=True))
            print(f"{num:6} rows: sum with norm {one:8.1f} us   sum, then norm {two:8.1f} us", flush=True)


def with_norms(ours: CudaRank, barrier: Barrier) -> list[tuple[int, float, float]]:
    found = []
    for rows in ROWS:
        x, residual, weight = (
            torch.randn(size, device="cuda").bfloat16() for size in ((rows, 4096), (rows, 4096), (4096,))
        )

        def apart(x=x, residual=residual, weight=weight) -> None:
            ops.add_rms_norm(ours.sum(x), residual, weight, 1e-5)

        together = partial(ours.add_rms_norm, x, residual, weight, 1e-5)
        found.append((rows, timed(together, barrier), timed(apart, barrier)))
    return found


def _by_nccl(nccl, x: torch.Tensor) -> None:
    nccl.allreduce([x]).wait()


def timed(work, barrier: Barrier) -> float:
    """Microseconds of one of TIMES in a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(TIMES):
                work()
        least = float("inf")
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            barrier.wait()
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            least = min(least, begin.elapsed_time(end) * 1e3 / TIMES)
    return least


if __name__ == "__main__":
    main()
