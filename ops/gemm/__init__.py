"""Linear layers: preparation of weights for the chosen kernel, once at load, and products with them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ops import backends
from ops.activation import activate, gated, silu_mul
from ops.gemm import coded, cuda, native, reference
from ops.gemm.by_head import HeadsWeight, NativeHeadsWeight, ReferenceHeadsWeight
from ops.gemm.rounded import RoundedRows
from ops.gemm.side_by_side import SideBySide
from ops.gemm.weight import LinearWeight
from ops.registry import USUAL, Kernel, Op, ShapeClass, capability
from ops.stored import CODED, Stored, WeightFormat, formats_of, parts_of


def _each_is_read(case: ShapeClass) -> str | None:
    if (why := backends.on_cuda_at_any_size(case)) is not None:
        return why
    if len(case.weight) < 2:
        return "it is for rows in several formats"
    return next(filter(None, (_prepare_linear.refusal(case._replace(weight=(each,))) for each in case.weight)), None)


def _prepare_each(stored: Stored) -> LinearWeight:
    """Prepare parts in several formats. The dtype of activations is that of the plain parts, or bfloat16 if there are none."""
    parts = parts_of(stored)
    dtype = next((part.format.dtype for part in parts if part.format.dtype is not None), torch.bfloat16)
    return SideBySide(stored, lambda run: prepare_linear(run, dtype))


_prepare_linear = Op(
    "linear",
    USUAL,
    [
        backends.native("linear", native.NativeLinearWeight, native.supports),
        Kernel("linear", "cuda", cuda.supports, cuda.CudaLinearWeight),
        Kernel("linear", "coded", coded.supports, coded.prepare),
        Kernel("linear", "side by side", _each_is_read, _prepare_each),
        Kernel("linear", "reference", reference.supports, reference.ReferenceLinearWeight),
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


def prepare_linear(stored: Stored, activations: torch.dtype | None = None) -> LinearWeight:
    """Convert a weight and its bias to the form that the chosen kernel reads. Several parts are stacked by rows. This is done once
    at load; the originals may be dropped afterwards. `activations`: dtype of activations and biases. By default it is the dtype of
    plain weights, or float32 for quantised ones.

    Raises NotImplementedError if no kernel supports the formats (`linear_refusal`), and ValueError for values that it cannot
    store."""
    parts = parts_of(stored)
    formats = formats_of(parts)
    dtype = activations or parts[0].format.dtype or torch.float32
    made: LinearWeight = _prepare_linear.runs[parts[0].weight.device, dtype, None, 0, formats](stored)
    return made


def linear_refusal(formats: Iterable[WeightFormat], activations: torch.dtype, device: torch.device) -> str | None:
    """Return why `prepare_linear` does not support rows in these formats for this dtype of activations and device; None if it
    does."""
    case = ShapeClass(device.type, activations, weight=tuple(formats), capability=capability(device))
    return _prepare_linear.refusal(case)


def embedding_refusal(formats: Iterable[WeightFormat], activations: torch.dtype, device: torch.device) -> str | None:
    """Return why these formats cannot be an embedding, whose rows are read one by one; None if they can. See `linear_refusal`."""
    formats = tuple(formats)
    if not CODED.isdisjoint(formats) or (device.type != "cpu" and any(each.dtype is None for each in formats)):
        return "an embedding's rows are read as plain numbers"
    return linear_refusal(formats, activations, device)


def linear(x: Tensor | RoundedRows, w: LinearWeight) -> Tensor:
    """Return x @ weight.T + bias [T, N] for x [T, K]. T may be 0. x may also be quantised rows, a result of `normed_for(w,
    ...)`."""
    return w.matmul_rounded(x) if isinstance(x, RoundedRows) else w.matmul(x)


def normed_for(
    w: LinearWeight, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> Tensor | RoundedRows:  # fmt: skip
    """Return the RMS norm of `residual`, after adding x to it in place if x is given. The result is for `linear(..., w)` only: if
    that would quantise it, it is quantised in the same kernel."""
    return w.normed(x, residual, weight, eps)


def activated_linear(x: Tensor, w: LinearWeight, activation: str) -> Tensor:
    """Return `activate(linear(x, w), activation)` [T, N] for x [T, K]."""
    out = w.activated_matmul(x, activation)
    return activate(w.matmul(x), activation) if out is None else out


def gated_linear(x: Tensor, w: LinearWeight, activation: str = "silu") -> Tensor:
    """Return `gated(linear(x, w), activation)` [T, N / 2] for x [T, K]. The first half of w's rows is gate, the second up."""
    if activation != "silu":
        return gated(w.matmul(x), activation)
    out = w.gated_matmul(x)
    return silu_mul(w.matmul(x)) if out is None else out


def gated_mlp(x: Tensor | RoundedRows, gate_up: LinearWeight, down: LinearWeight, activation: str = "silu") -> Tensor:
    """Return `linear(gated_linear(x, gate_up, activation), down)` [T, N] for x [T, K], where N is the output size of `down`."""
    if activation != "silu":
        return down.matmul(gated(linear(x, gate_up), activation))
    inner = gate_up.gated_matmul_rounded(x) if isinstance(x, RoundedRows) else gate_up.gated_matmul(x)
    return down.matmul_of_gated(linear(x, gate_up)) if inner is None else down.matmul(inner)


def prepare_heads(weight: Tensor) -> HeadsWeight:
    """Convert weight [heads, N, K], which has one matrix per head, to the form that the chosen kernel reads."""
    return _prepare_heads.runs[weight.device, weight.dtype](weight)


def linear_by_head(x: Tensor, w: HeadsWeight) -> Tensor:
    """Return x [T, heads, K] multiplied by each head's own matrix: [T, heads, N]."""
    return w.matmul(x)
