"""Exchanges between two devices: right at every size and in every type, the same bits on both, again and again, and in graphs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ops
from ops.collective import peer_memory
from runtime.parallel.group import Group, HostRank
from runtime.platform.cuda_peers import CudaRank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SIZE = 2


@pytest.fixture(scope="module")
def pair():
    """Runs a function of each rank on that rank's own thread, with its device current."""
    if (why := peer_memory.refusal(range(SIZE))) is not None:
        pytest.skip(why)
    group = Group(SIZE)
    threads = [ThreadPoolExecutor(1) for _ in range(SIZE)]

    def join(number):
        torch.cuda.set_device(number)
        rank = HostRank(group, number)
        return rank.within(group.claim(number), lambda: CudaRank(rank))

    def every(work, *items):
        return [
            each.result()
            for each in [t.submit(work, *item) for t, item in zip(threads, zip(*items, strict=True), strict=True)]
        ]

    ranks = every(join, range(SIZE))
    yield lambda work: every(work, ranks)
    for thread in threads:
        thread.shutdown()


def drawn(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 2), (1, 66), (3, 1024), (32, 4096), (64, 4096), (1000, 4096), (9000, 4096)])
def test_sums_are_those_of_float32_rounded_once(pair, shape, dtype):
    given = [drawn(shape, dtype, seed) for seed in range(SIZE)]
    expected = (given[0].float() + given[1].float()).to(dtype)
    for _ in range(3):  # both halves of the buffers
        for out in pair(lambda rank: rank.sum(given[rank.number].cuda()).cpu()):
            assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(1, 64), (1, 4096), (3, 5120), (64, 4096), (65, 4096), (256, 4096), (700, 2048), (7, 16384), (9000, 4096)]
)
def test_a_sum_with_the_norm_is_the_sum_and_then_the_norm(pair, shape, dtype):
    given = [drawn(shape, dtype, seed) for seed in range(SIZE)]
    stream, weight = drawn(shape, dtype, 7), drawn(shape[1:], dtype, 8)

    def work(rank):
        x, one, other = given[rank.number].cuda(), stream.cuda(), stream.cuda()
        expected = ops.add_rms_norm(rank.sum(x), one, weight.cuda(), 1e-5)
        found = [rank.add_rms_norm(x, other, weight.cuda(), 1e-5)]
        assert torch.equal(one, other)
        torch.testing.assert_close(found[0].float(), expected.float(), rtol=1e-2, atol=1e-3)
        found += [
            rank.add_rms_norm(x, stream.cuda(), weight.cuda(), 1e-5) for _ in range(2)
        ]  # both halves of the buffers
        return [each.cpu() for each in found]

    first, second = pair(work)
    for each in (*first[1:], *second):
        assert torch.equal(each, first[0])


@pytest.mark.parametrize("shape", [(1, 64128), (1, 8), (5, 48), (256, 64128), (700, 75968)])
def test_columns_stand_in_the_order_of_the_ranks(pair, shape):
    given = [drawn(shape, torch.bfloat16, seed) for seed in range(SIZE)]
    for _ in range(2):
        for out in pair(lambda rank: rank.concat(given[rank.number].cuda()).cpu()):
            assert torch.equal(out, torch.cat(given, dim=1))


def test_many_in_a_row_of_changing_sizes_and_ranks_that_run_ahead(pair):
    sizes = [2, 70_000, 4096, 2_000_000, 16, 300_000, 4096] * 20

    def work(rank):
        if rank.number:
            torch.cuda._sleep(200_000_000)  # the other one is ahead by what its stream holds
        outs = [
            rank.sum(torch.full((size,), float(index % 7 + rank.number), device="cuda"))
            for index, size in enumerate(sizes)
        ]
        return [bool((out == 2 * (index % 7) + 1).all()) for index, out in enumerate(outs)]

    for right in pair(work):
        assert all(right)


def test_captured_exchanges_are_new_ones_at_each_replay(pair):
    def work(rank):
        x = torch.zeros(8, 4096, device="cuda", dtype=torch.bfloat16)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            rank.sum(x)  # compiled
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = rank.sum(rank.sum(x))
            found = []
            for number in range(20):
                x.fill_(number)
                graph.replay()
                found.append(out[0, 0].item())
        return found

    assert pair(work) == [[4.0 * number for number in range(20)]] * SIZE
