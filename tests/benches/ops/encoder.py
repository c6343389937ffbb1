"""An encoder's layer on CUDA, part by part, beside what else could compute it: `python -m tests.benches.ops.encoder`.

BERT-base in bfloat16 at 512 tokens a text. Each line is twelve layers' worth in a graph, as in service; microseconds a layer. The
floor of a product is the rate that a large square one reaches here, that of the rest the bytes at the speed of a copy."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

import ops
from ops.stored import StoredWeight
from tests.benches.ops.cuda import COPY_BYTES_PER_US, us

LAYERS, HIDDEN, INNER, HEADS, TEXT = 12, 768, 3072, 12, 512


def square_rate() -> float:
    """Multiply-adds a microsecond, times two."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / us(lambda: [torch.mm(a, b) for _ in range(4)] and None, 4)


def bench(num_texts: int, rate: float) -> None:
    tokens = num_texts * TEXT
    x, inner = (torch.randn(tokens, size, device="cuda").bfloat16() for size in (HIDDEN, INNER))

    def line(what: str, floor: float, **ways: Callable[[int], object]) -> None:
        times = []
        for name, way in ways.items():

            def work(way=way) -> None:
                for layer in range(LAYERS):
                    way(layer)

            try:
                times.append(f"{name} {us(work, LAYERS):.1f}")
            except Exception as error:  # not every release of torch has every way
                times.append(f"{name} - ({type(error).__name__}: {str(error).splitlines()[0][:60]})")
        print(f"{num_texts} x {TEXT} {what}: {', '.join(times)}, floor {floor:.1f}", flush=True)

    for what, out, size in (("qkv", 3 * HIDDEN, HIDDEN), ("o", HIDDEN, HIDDEN), ("down", HIDDEN, INNER)):
        plain = [torch.randn(out, size, device="cuda").bfloat16() for _ in range(LAYERS)]
        bias = torch.randn(out, device="cuda").bfloat16()
        ours = [ops.prepare_linear(StoredWeight.dense(each, bias), torch.bfloat16) for each in plain]
        given = x if size == HIDDEN else inner
        line(
            what, 2 * tokens * out * size / rate,
            ours=lambda layer, ours=ours, given=given: ops.linear(given, ours[layer]),
            addmm=lambda layer, plain=plain, given=given, bias=bias: torch.addmm(bias, given, plain[layer].T),
            mm=lambda layer, plain=plain, given=given: torch.mm(given, plain[layer].T),
        )  # fmt: skip

    plain = [torch.randn(INNER, HIDDEN, device="cuda").bfloat16() / 30 for _ in range(LAYERS)]
    bias = torch.randn(INNER, device="cuda").bfloat16()
    ours = [ops.prepare_linear(StoredWeight.dense(each, bias), torch.bfloat16) for each in plain]
    line(
        "up and GELU", 2 * tokens * INNER * HIDDEN / rate,
        ours=lambda layer: ops.activate(ops.linear(x, ours[layer]), "gelu"),
        up_alone=lambda layer: ops.linear(x, ours[layer]),
        gelu_alone=lambda layer: ops.activate(inner, "gelu"),
        epilogue=lambda layer: torch._addmm_activation(bias, x, plain[layer].T, use_gelu=True),
        torch=lambda layer: functional.gelu(torch.addmm(bias, x, plain[layer].T)),
    )  # fmt: skip
    exact = functional.gelu(torch.addmm(bias, x, plain[0].T).double())
    for name, found in (
        ("ours", ops.activate(ops.linear(x, ours[0]), "gelu")),
        ("epilogue", torch._addmm_activation(bias, x, plain[0].T, use_gelu=True)),
    ):
        print(f"{name}: off from float64's by {float((found.double() - exact).norm() / exact.norm()):.2e}")

    weight, shift = (torch.randn(HIDDEN, device="cuda").bfloat16() for _ in range(2))
    residual = torch.randn_like(x)
    line(
        "add and norm", 4 * 2 * tokens * HIDDEN / COPY_BYTES_PER_US,
        ours=lambda layer: ops.add_layer_norm(x, residual, weight, shift, 1e-12),
    )  # fmt: skip

    qkv = torch.randn(tokens, 3 * HIDDEN, device="cuda").bfloat16()
    heads = ops.AttentionHeads(
        HEADS, HEADS, HIDDEN // HEADS, (HIDDEN // HEADS) ** -0.5, torch.empty(1, 0, device="cuda"), mask="full"
    )
    starts = torch.arange(0, tokens + 1, TEXT, dtype=torch.int32, device="cuda")
    lengths = torch.full((num_texts,), TEXT, dtype=torch.int32, device="cuda")
    meta = ops.AttentionMeta(starts, lengths, torch.empty(num_texts, 0, dtype=torch.int32, device="cuda"), TEXT, TEXT)
    positions = torch.arange(TEXT, device="cuda").repeat(num_texts)
    q, k, v = qkv.view(tokens, 3, HEADS, -1).unbind(1)

    def dense(backend: torch.nn.attention.SDPBackend) -> Tensor:
        with torch.nn.attention.sdpa_kernel(backend):
            parts = (each.view(num_texts, TEXT, HEADS, -1).transpose(1, 2) for each in (q, k, v))
            return functional.scaled_dot_product_attention(*parts)

    def varlen() -> object:
        return torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, TEXT, TEXT, 0.0, False, False)

    backend = torch.nn.attention.SDPBackend
    line(
        "attention", 4 * tokens * TEXT * HIDDEN / rate,
        ours=lambda layer: ops.attend_packed(qkv, heads, positions, meta),
        flash_varlen=lambda layer: varlen(),
        flash=lambda layer: dense(backend.FLASH_ATTENTION),
        cudnn=lambda layer: dense(backend.CUDNN_ATTENTION),
    )  # fmt: skip
    wanted = dense(backend.MATH).transpose(1, 2).reshape(tokens, HIDDEN).float()
    for name, found in (("ours", ops.attend_packed(qkv, heads, positions, meta)), ("varlen", varlen())):
        given = found if isinstance(found, Tensor) else found[0].reshape(tokens, HIDDEN)
        print(f"attention, {name}: off by {float((given.float() - wanted).norm() / wanted.norm()):.2e}")


@torch.inference_mode()
def main() -> None:
    rate = square_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {rate / 1e6:.0f} TFLOP/s in bfloat16")
    for num_texts in map(int, sys.argv[1:] or ["1", "6", "16", "64"]):
        bench(num_texts, rate)


if __name__ == "__main__":
    main()
