"""Compiled stacks: the native kernels on the same numbers, and nothing that was done to a symbol is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ops
from ops import native
from ops.kv.eight_bits import SCALE_BYTES

H, HEADS, KV_HEADS, D, BLOCK, POSITIONS = 48, 4, 2, 16, 8, 64


@pytest.fixture(autouse=True)
def _native() -> None:
    if refusal := native.missing:
        pytest.skip(refusal)


class Layer:
    """Attention and MLP, with all that may surround them."""

    def __init__(self, cache_dtype: torch.dtype, num_blocks: int = 12) -> None:
        def linear(n: int, k: int) -> ops.LinearWeight:
            return ops.prepare_linear(ops.StoredWeight.dense(torch.randn(n, k) / 7, torch.randn(n)))

        self.qkv, self.out = linear((HEADS + 2 * KV_HEADS) * D, H), linear(H, HEADS * D)
        self.gate_up, self.down = linear(2 * 80, H), linear(H, 80)
        self.norm, self.shift = torch.randn(H), torch.randn(H)
        norms = torch.randn(D), torch.randn(D)
        angles = torch.arange(POSITIONS)[:, None] * torch.rand(D // 2)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.heads = ops.AttentionHeads(
            HEADS, KV_HEADS, D, 0.3, cos_sin, norms, 1e-5, window=20, softcap=8.0, sinks=torch.randn(HEADS)
        )
        shape = (num_blocks, KV_HEADS, BLOCK, D + (SCALE_BYTES if cache_dtype == torch.int8 else 0))
        self.k, self.v = torch.zeros(shape, dtype=cache_dtype), torch.zeros(shape, dtype=cache_dtype)

    def forward(self, x: Tensor | None, step: ops.StepSymbols) -> Tensor:
        if x is None:
            x = ops.layer_norm(step.residual, self.norm, self.shift, 1e-5)
        else:
            x = ops.add_rms_norm(x, step.residual, self.norm, 1e-5)
        qkv = ops.linear(x, self.qkv)
        mixed = ops.attend(qkv, self.heads, step.positions, self.k, self.v, step.slot_mapping[0], step.attn_metadata[0])
        x = ops.rms_norm(ops.linear(mixed, self.out), self.norm, 1e-6)
        x *= 0.7
        beside = ops.linear(ops.gated_linear(x, self.gate_up), self.down)
        x = ops.add_layer_norm(x, step.residual, None, self.shift, 1e-5)
        gelu = ops.linear(ops.gated(ops.linear(ops.activate(x, "relu2"), self.gate_up), "gelu_tanh"), self.down)
        gelu += beside
        return gelu


def step(starts: list[int], lens: list[int], num_blocks: int = 12) -> ops.StepSymbols:
    """Rows whose blocks are 0, 1, ... in turn."""
    tables, positions, slot_mapping = [], [], []
    for row, context in enumerate(lens):
        tables.append([(row * 4 + i) % num_blocks for i in range(4)])
        for position in range(context - (starts[row + 1] - starts[row]), context):
            positions.append(position)
            slot_mapping.append(tables[row][position // BLOCK] * BLOCK + position % BLOCK)
    meta = ops.AttentionMeta(
        torch.tensor(starts, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32),
        torch.tensor(tables, dtype=torch.int32), max(lens), max(lens),
    )  # fmt: skip
    residual = torch.randn(starts[-1], H)
    return ops.StepSymbols(
        residual,
        torch.zeros(starts[-1], dtype=torch.int64),
        torch.tensor(positions),
        (torch.tensor(slot_mapping),),
        (meta,),
    )


def trace(layers: list[Layer], *, after: bool = False) -> ops.CompiledStack:
    tracer = ops.Tracer(H, 1, after=after)
    for layer in layers:
        tracer.add(layer.forward)
    return tracer.finish()


@pytest.mark.parametrize("cache_dtype", sorted(native.CACHE_TYPES, key=str))
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_compiled_stack_gives_the_bits_of_the_functions(
    isa: str, cache_dtype: torch.dtype, after: bool, threads: int
) -> None:
    ops.set_num_threads(threads)
    layers = [Layer(cache_dtype) for _ in range(3)]
    compiled = trace(layers, after=after)
    for starts, lens in (([0, 30], [30]), ([0, 1], [31]), ([0, 1, 8, 9], [32, 7, 1]), ([0, 32], [32])):
        inputs = step(starts, lens)
        residual, first = inputs.residual.clone(), torch.randn(starts[-1], H) if after else None
        expected: Tensor | None = None if first is None else first.clone()
        for layer in layers:
            expected = layer.forward(expected, inputs)
        caches = [(layer.k.clone(), layer.v.clone()) for layer in layers]
        got = compiled.run(first, residual, inputs.positions, inputs.slot_mapping, inputs.attn_metadata)
        assert expected is not None
        assert torch.equal(got, expected)
        assert torch.equal(residual, inputs.residual)
        for layer, (k, v) in zip(layers, caches, strict=True):
            assert torch.equal(layer.k, k)
            assert torch.equal(layer.v, v)


@pytest.mark.parametrize(
    "do",
    [
        lambda x: x + 1, lambda x: x.clamp_(-1, 1), lambda x: x[:, :8], lambda x: x.view(-1), lambda x: x.sum(),
        lambda x: x.mul_(torch.ones(1, H)), lambda x: x.add_(x, alpha=2), lambda x: ops.silu_mul(x.double()),
        lambda x: x.tolist(), lambda x: torch.cat([x, x]), lambda x: bool(x[0, 0] > 0), lambda x: x.copy_(torch.ones(1, H)),
    ],
)  # fmt: skip
def test_what_a_tracer_does_not_know_is_refused_and_leaves_it_as_it_was(do) -> None:
    layers = [Layer(torch.float32), Layer(torch.float32)]
    tracer = ops.Tracer(H, 1, after=False)
    tracer.add(layers[0].forward)

    def other(x: Tensor | None, step: ops.StepSymbols) -> Tensor:
        y = layers[1].forward(x, step)
        do(y)
        return y

    with pytest.raises(ops.NotTraceable):
        tracer.add(other)
    inputs = step([0, 5], [5])
    residual = inputs.residual.clone()
    got = tracer.finish().run(None, residual, inputs.positions, inputs.slot_mapping, inputs.attn_metadata)
    assert torch.equal(got, layers[0].forward(None, inputs))


def test_inputs_that_do_not_fit_are_refused() -> None:
    compiled = trace([Layer(torch.float32)])

    def run(**changes: Tensor) -> None:
        inputs = step([0, 5], [5])
        parts = {
            "residual": inputs.residual, "positions": inputs.positions, "slot_mapping": inputs.slot_mapping[0],
            "lens": inputs.attn_metadata[0].seq_lens, "tables": inputs.attn_metadata[0].block_tables,
        } | changes  # fmt: skip
        meta = ops.AttentionMeta(inputs.attn_metadata[0].query_start_loc, parts["lens"], parts["tables"], 5, 5)
        compiled.run(None, parts["residual"], parts["positions"], (parts["slot_mapping"],), (meta,))

    run()
    for name, wrong in {
        "residual": torch.zeros(5, H + 1), "positions": torch.tensor([0, 1, 2, 3, POSITIONS]),
        "slot_mapping": torch.tensor([0, 1, 2, 3, 12 * BLOCK]), "lens": torch.tensor([999], dtype=torch.int32),
        "tables": torch.tensor([[12, 0, 0, 0]], dtype=torch.int32),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=r"holds|shape|needs|names"):
            run(**{name: wrong})


def test_references_record_nothing() -> None:
    cpu = torch.device("cpu")
    assert ops.can_trace(cpu, torch.float32)
    assert not ops.can_trace(cpu, torch.bfloat16)
    ops.force("reference")
    try:
        assert not ops.can_trace(cpu, torch.float32)
    finally:
        ops.force(None)
