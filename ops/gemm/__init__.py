"""Linear layers: weights brought once into the form that a kernel reads, and the products with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops import backends
from ops import native as cpu
from ops.activation import gated, silu_mul
from ops.gemm import cuda, native, reference
from ops.gemm.by_head import HeadsWeight, NativeHeadsWeight, ReferenceHeadsWeight
from ops.gemm.weight import BlockRows, LinearWeight
from ops.registry import USUAL, Kernel, Op, forced

_prepare_linear = Op(
    "linear",
    USUAL,
    [
        backends.native("linear", native.NativeLinearWeight),
        Kernel("linear", "cuda", cuda.supports, cuda.CudaLinearWeight),
        backends.reference("linear", reference.ReferenceLinearWeight),
    ],
)
_prepare_heads = Op(
    "linear_by_head",
    USUAL,
    [
        backends.native("linear_by_head", NativeHeadsWeight),
        backends.reference("linear_by_head", ReferenceHeadsWeight),
    ],
)


def prepare_linear(weight: Tensor, bias: Tensor | None = None, activations: torch.dtype | None = None) -> LinearWeight:
    """Bring weight [N, K] and bias [N] into the form the chosen kernel reads. Done once at load; the originals may be
    dropped afterwards. `activations`: the dtype that it will meet, if not its own; bias is of that dtype. Where there are
    `block_types`, float32 activations meet weights of 16 bits too."""
    return _prepare_linear.runs[weight.device, activations or weight.dtype](weight, bias)


def block_types(device: torch.device) -> frozenset[str]:
    """GGUF's block types that `prepare_block_linear` takes there; none where only references compute."""
    narrow = device.type == "cpu" and cpu.module is not None and forced() != "reference"
    return native.BLOCK_TYPES if narrow else frozenset()


def prepare_block_linear(parts: Sequence[BlockRows], bias: Tensor | None = None) -> LinearWeight:
    """The same for a weight whose rows stay quantised: parts of any of `block_types` with the same in_features, stacked."""
    return native.NativeBlockWeight(parts, bias)


def prepare_int8_linear(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Round a float weight [N, K] to eight bits in blocks of 32 along K. Where `block_types` has "Q8_0".

    Raises ValueError where it holds NaNs or infinities."""
    return native.NativeInt8Weight(weight, bias)


def linear(x: Tensor, w: LinearWeight) -> Tensor:
    """x [T, K] -> x @ weight.T + bias, [T, N], in the dtype the weight was prepared for. T may be 0."""
    return w.matmul(x)


def gated_linear(x: Tensor, w: LinearWeight, activation: str = "silu") -> Tensor:
    """gated(linear(x, w), activation), x [T, K] -> [T, N / 2]: rows of w are gates, then as many ups."""
    if activation != "silu":
        return gated(w.matmul(x), activation)
    out = w.gated_matmul(x)
    return silu_mul(w.matmul(x)) if out is None else out


def prepare_heads(weight: Tensor) -> HeadsWeight:
    """Bring a matrix for each head, weight [heads, N, K], into the form that the chosen kernel reads."""
    return _prepare_heads.runs[weight.device, weight.dtype](weight)


def linear_by_head(x: Tensor, w: HeadsWeight) -> Tensor:
    """x [T, heads, K], each head times its own matrix -> [T, heads, N]."""
    return w.matmul(x)
