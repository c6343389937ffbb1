"""Triton's adapters against the reference in float64: on the CPU by Triton's interpreter, on a GPU for real."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.gemm import tiled_plus
from ops.lora import few_tokens
from ops.lora.reference import ReferenceLoraSlots
from ops.lora.triton_index import index, tile_rows
from ops.lora.triton_lora import TritonLoraSlots
from tests.ops.places import DEVICES, interpreted_once, places

IN, PARTS, NUM_SLOTS = 200, (136, 24, 24), 5
# Enough of each to fill tiles, to leave one unfilled, and to leave slots out; with and without tokens that have none.
MIXTURES = {
    "nobody": [-1] * 3,
    "one": [3],
    "all slots": [4, 3, 2, 1, 0, -1],
    "many": [0] * 33 + [-1] * 2 + [4] * 7 + [0] * 5 + [2] * 16,
}


def parts(seed: int, ranks: tuple[int, ...]) -> list[ops.LoraPart]:
    random, start, found = torch.Generator().manual_seed(seed), 0, []
    for size, rank in zip(PARTS, ranks, strict=True):
        if rank:
            a, b = torch.randn(rank, IN, generator=random) / 8, torch.randn(size, rank, generator=random) / 8
            found.append(ops.LoraPart(start, a, b, 1.0 + seed))
        start += size
    return found


def over_all(seed: int, rank: int) -> list[ops.LoraPart]:
    """One for all parts, as a fused projection of a checkpoint has it."""
    random = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, IN, generator=random) / 8, torch.randn(sum(PARTS), rank, generator=random) / 8
    return [ops.LoraPart(0, a, b, 2.0)]


SHARES = {
    3: over_all(7, 9),
    0: parts(0, (8, 8, 8)),
    1: parts(1, (0, 20, 0)),
    2: parts(2, (3, 0, 20)),
    4: parts(4, (16, 1, 5)),
}


def filled(kind, dtype: torch.dtype, device: str) -> ops.LoraSlots:
    slots = kind(ops.LoraShape(sum(PARTS), IN, PARTS, NUM_SLOTS, 20), dtype, torch.device(device))
    for slot, some in SHARES.items():
        slots.put(slot, slots.prepared(some))
    return slots


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixture", [*MIXTURES.values(), [n % 7 - 1 if n % 7 < 6 else -1 for n in range(600)]])
def test_tokens_are_sorted_by_slot_and_cut_into_tiles(mixture, device):
    slots = torch.tensor(mixture, dtype=torch.int32, device=device)
    found = index(slots, NUM_SLOTS)
    order, rows = found.order.tolist(), tile_rows(len(mixture))
    assert sorted(order) == [*range(len(mixture))]
    with_adapter, in_all = found.used.tolist()
    seen = []
    for number, (slot, first, end) in enumerate(found.tiles.T.tolist()[:in_all]):
        assert (slot >= 0) == (number < with_adapter)
        tokens = order[first : min(end, first + rows)]
        assert tokens
        assert {mixture[token] for token in tokens} == {slot}
        seen += tokens
    assert seen == order


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(places(1e-5, 2e-3, 2e-2)))
@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_token_takes_its_own_slot_s_adapter(mixture, device, dtype, tolerance):
    given = MIXTURES[mixture]
    random = torch.Generator().manual_seed(3)
    x, out = (torch.randn(len(given), size, generator=random).to(dtype) for size in (IN, sum(PARTS)))
    expected = out.double()
    filled(ReferenceLoraSlots, torch.float64, "cpu").add(
        x.double(), ops.TokenAdapters(torch.tensor(given, dtype=torch.int32)), expected
    )
    got = out.to(device)
    adapters = index(torch.tensor(given, dtype=torch.int32, device=device), NUM_SLOTS)
    filled(TritonLoraSlots, dtype, device).add(x.to(device), adapters, got)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=tolerance, atol=tolerance * 10)
    untouched = [token for token, slot in enumerate(given) if slot not in SHARES]
    assert torch.equal(got.cpu()[untouched], out[untouched])


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(places(1e-5, 2e-3, 2e-2)))
@pytest.mark.parametrize("mixture", MIXTURES)
def test_gate_and_up_are_gated_with_what_adapters_add(mixture, device, dtype, tolerance):
    """In the kernel that adds it: for tokens without an adapter, too, and for adapters of one of the two alone."""
    width, random, given = 72, torch.Generator().manual_seed(4), MIXTURES[mixture]
    shape = ops.LoraShape(2 * width, IN, (width, width), NUM_SLOTS, 20)
    x, gate_up = (torch.randn(len(given), size, generator=random).to(dtype) for size in (IN, 2 * width))
    reference = ReferenceLoraSlots(shape, torch.float64, torch.device("cpu"))
    slots = TritonLoraSlots(shape, dtype, torch.device(device))
    for slot, starts in {0: (0, width), 1: (0,), 2: (width,), 3: (0, width)}.items():
        some = [
            ops.LoraPart(start, *(torch.randn(size, generator=random) / 8 for size in ((9, IN), (width, 9))), 2.0)
            for start in starts
        ]
        reference.put(slot, reference.prepared(some))
        slots.put(slot, slots.prepared(some))
    by_token = torch.tensor(given, dtype=torch.int32)
    expected = gate_up.double()
    reference.add(x.double(), ops.TokenAdapters(by_token), expected)
    expected = torch.nn.functional.silu(expected[:, :width]) * expected[:, width:]
    adapters, x = index(by_token.to(device), NUM_SLOTS), x.to(device)
    got = slots.gated(x, adapters, gate_up.to(device))
    torch.testing.assert_close(got.cpu().double(), expected, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("device", DEVICES)
def test_a_program_takes_several_tiles_where_there_are_more(device, monkeypatch):
    """One program for all tiles of a column: what it computes is bitwise what one for each does."""
    slots, random = filled(TritonLoraSlots, torch.float32, device), torch.Generator().manual_seed(5)
    x, given = torch.randn(len(MIXTURES["many"]), IN, generator=random).to(device), MIXTURES["many"]
    adapters, found = index(torch.tensor(given, dtype=torch.int32, device=device), NUM_SLOTS), []
    for programs in (1, 1 << 20):
        monkeypatch.setattr("ops.lora.triton_lora._PROGRAMS", programs)
        out = torch.zeros(len(given), sum(PARTS), device=device)
        slots.add(x, adapters, out)
        found.append(out)
    assert torch.equal(*found)
    assert found[0].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_takes_another_adapter_and_none(device):
    slots, x = filled(TritonLoraSlots, torch.float32, device), torch.ones(2, IN, device=device)
    adapters = index(torch.zeros(2, dtype=torch.int32, device=device), NUM_SLOTS)

    def added() -> torch.Tensor:
        out = torch.zeros(2, sum(PARTS), device=device)
        slots.add(x, adapters, out)
        return out

    first = added()
    slots.put(0, slots.prepared(SHARES[1]))
    second = added()
    assert not second[:, : PARTS[0]].any()  # nothing is left of the one before
    assert second[:, PARTS[0] : PARTS[0] + PARTS[1]].any()
    slots.put(0, None)
    assert first.any()
    assert not added().any()


@pytest.mark.gpu
def test_one_graph_serves_any_mixture():
    device = torch.device("cuda")
    slots, x = filled(TritonLoraSlots, torch.bfloat16, "cuda"), torch.randn(16, IN, device=device).bfloat16()
    given = torch.full((16,), -1, dtype=torch.int32, device=device)
    out = torch.zeros(16, sum(PARTS), device=device, dtype=torch.bfloat16)

    def run() -> None:
        out.zero_()
        slots.add(x, index(given, NUM_SLOTS), out)

    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    for mixture in ([-1] * 16, [0] * 16, [0, 4, 2, -1] * 4, [1, 3] * 8):
        given.copy_(torch.tensor(mixture, dtype=torch.int32))
        graph.replay()
        replayed = out.clone()
        run()
        assert torch.equal(replayed, out)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["beside", "at the end"])
@pytest.mark.parametrize("num_tokens", [1, 7, 40, 256])
def test_graphs_with_adapters_compute_what_kernels_alone_do(num_tokens, way, monkeypatch):
    """Bit by bit, in graphs that are replayed often, where kernels begin early: layers of every kind of kernel, each of which reads
    what the one before has written, with norms between. What shrinks beside the weight's product is what shrinks behind it."""
    if way == "at the end" and num_tokens > tiled_plus.MAX_ROWS:
        pytest.skip("no kernel does that for so many")
    device, size, width, random = torch.device("cuda"), 2048, 4096, torch.Generator("cuda").manual_seed(num_tokens)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device="cuda") / shape[-1] ** 0.5

    def layer(parts: tuple[int, ...], inner: int) -> tuple[ops.LinearWeight, TritonLoraSlots]:
        slots = TritonLoraSlots(ops.LoraShape(sum(parts), inner, parts, 5, 16), torch.bfloat16, device)
        for tensor, spread in zip(slots.slots, (1.0, 4.0, 0.0), strict=True):
            tensor.copy_(drawn(*tensor.shape) * spread if spread else torch.ones_like(tensor))
        return ops.prepare_linear(ops.StoredWeight.dense(drawn(sum(parts), inner).bfloat16())), slots

    layers = [(layer((size, 512, 512), size), layer((width, width), size), layer((size,), width)) for _ in range(4)]
    norm = torch.ones(size, device=device).bfloat16()
    adapters = index(torch.arange(num_tokens, dtype=torch.int32, device=device) % 6 - 1, 5)
    given = drawn(num_tokens, size).bfloat16()

    def linear(weight: ops.LinearWeight, slots: TritonLoraSlots, x: torch.Tensor, *, gated: bool) -> torch.Tensor:
        if way == "at the end":
            return weight.matmul_plus(x, slots.low_rank(x, adapters, gated=gated), gated=gated)
        begun = slots.begin(x, adapters)
        out = weight.matmul(x)
        if gated:
            return slots.gated(x, adapters, out, begun)
        slots.add(x, adapters, out, begun)
        return out

    def computed(waits: bool = False) -> torch.Tensor:
        x, residual = given, torch.zeros_like(given)
        for of_qkv, of_gate_up, of_down in layers:
            for of_layer, gated in ((of_qkv, False), (of_gate_up, True), (of_down, False)):
                if of_layer is not of_down:
                    x = ops.add_rms_norm(x[:, :size].contiguous(), residual, norm, 1e-6)
                if waits:
                    torch.cuda.synchronize()
                x = linear(*of_layer, x, gated=gated)
                if waits:
                    torch.cuda.synchronize()
        return ops.add_rms_norm(x, residual, norm, 1e-6)

    with torch.inference_mode():
        monkeypatch.setattr(few_tokens, "MAX_BESIDE", 0)
        expected = computed(waits=True).clone()
        assert expected.isfinite().all()
        monkeypatch.setattr(few_tokens, "MAX_BESIDE", num_tokens if way == "beside" else 0)
        assert torch.equal(computed(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = computed()
        for _ in range(50):
            got.zero_()
            graph.replay()
            assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [16, 32, 64])
@pytest.mark.parametrize("num_tokens", [1, 9, 300, 512, 513])
def test_few_tokens_and_many_take_what_the_reference_does(num_tokens, rank, dtype, monkeypatch):
    """By few_tokens.cu, and by Triton where tokens are many or that is not taken: layers as large as those of real models, whose K
    has a piece that is not full. Sums over K are in float32, so what is rounded is h, and the result."""
    device, size, sizes = torch.device("cuda"), 9000, (1000, 512, 512)
    random = torch.Generator().manual_seed(num_tokens + rank)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype).float()

    x = (drawn(num_tokens, size) / size**0.5).to(dtype)
    slots_of = torch.randint(-1, 5, (num_tokens,), generator=random, dtype=torch.int32)
    for shape in (ops.LoraShape(2024, size, sizes, 5, rank), ops.LoraShape(2048, size, (1024, 1024), 5, rank)):
        reference = ReferenceLoraSlots(shape, torch.float64, torch.device("cpu"))
        slots = TritonLoraSlots(shape, dtype, device)
        for slot in range(5):
            some, start = [], 0
            for part in shape.parts:
                if (slot + start) % 3:
                    some.append(ops.LoraPart(start, drawn(rank, size), drawn(part, rank) / rank**0.5, 2.0))
                start += part
            for each in (reference, slots):
                each.put(slot, each.prepared(some))
        given = drawn(num_tokens, shape.out_features).to(dtype)
        expected = given.double()
        reference.add(x.double(), ops.TokenAdapters(slots_of), expected)
        gated = torch.nn.functional.silu(expected[:, :1024]) * expected[:, 1024:] if len(shape.parts) == 2 else None
        adapters = index(slots_of.to(device), 5)
        for most in (few_tokens.MAX_TOKENS, 0):
            monkeypatch.setattr(few_tokens, "MAX_TOKENS", most)
            out = given.to(device)
            slots.add(x.to(device), adapters, out)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(out.cpu().double(), expected, rtol=2 * eps, atol=8 * eps)
            assert torch.equal(out.cpu()[slots_of < 0], given[slots_of < 0])
            if gated is not None:
                out = slots.gated(x.to(device), adapters, given.to(device))
                torch.testing.assert_close(out.cpu().double(), gated, rtol=4 * eps, atol=16 * eps)
        monkeypatch.undo()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [16, 32])
@pytest.mark.parametrize("num_tokens", [1, 9, 32, 33, 64])
def test_a_product_adds_where_it_ends_what_the_reference_does(num_tokens, rank, dtype):
    """By tiled.cu: nobody, one adapter for all, and a mixture; with a K that is cut in two, and one that has a piece not full. What
    is rounded is h, and the result."""
    device, random, eps = (
        torch.device("cuda"),
        torch.Generator("cuda").manual_seed(num_tokens + rank),
        torch.finfo(dtype).eps,
    )

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype).float()

    mixture = torch.arange(num_tokens, dtype=torch.int32) * 7 % 6 - 1
    for size, sizes, gated in ((9000, (1024, 512, 512), False), (9000, (1024, 1024), True), (1096, (6720, 6720), True)):
        x = (drawn(num_tokens, size) / size**0.5).to(dtype)
        shape = ops.LoraShape(sum(sizes), size, sizes, 5, rank)
        reference = ReferenceLoraSlots(shape, torch.float64, device)
        slots = TritonLoraSlots(shape, dtype, device)
        for slot in range(5):
            starts = [sum(sizes[:part]) for part in range(len(sizes)) if (slot + part) % 3]
            some = [ops.LoraPart(start, drawn(rank, size), drawn(sizes[-1], rank) / rank**0.5, 2.0) for start in starts]
            for each in (reference, slots):
                each.put(slot, each.prepared(some))
        numbers = drawn(shape.out_features, size).to(dtype)
        weight = ops.prepare_linear(ops.StoredWeight.dense(numbers))
        given = x.double() @ numbers.double().T
        for slots_of in (torch.full_like(mixture, -1), torch.full_like(mixture, 3), mixture):
            expected, tolerance = given.clone(), 2 * eps
            reference.add(x.double(), ops.TokenAdapters(slots_of.to(device)), expected)
            if gated:
                width, tolerance = sizes[0], 4 * eps
                expected = torch.nn.functional.silu(expected[:, :width]) * expected[:, width:]
            low = slots.low_rank(x, index(slots_of.to(device), 5), gated=gated)
            out = weight.matmul_plus(x, low, gated=gated)
            torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=4 * tolerance)
