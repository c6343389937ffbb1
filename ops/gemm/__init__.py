"""Linear layers: weights brought once into the form that a kernel reads, and the products with them."""

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
    """Rows in several formats, each of which a kernel reads by itself."""
    if (why := backends.on_cuda_at_any_size(case)) is not None:
        return why
    if len(case.weight) < 2:
        return "it is for rows in several formats"
    return next(filter(None, (_prepare_linear.refusal(case._replace(weight=(each,))) for each in case.weight)), None)


def _prepare_each(stored: Stored) -> LinearWeight:
    """Prepare parts in several formats. Quantised parts use the activations' type of plain parts beside them, or the
    device's."""
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
    """Bring a weight and its bias into the form that the chosen kernel reads; several parts are stacked by their rows. Done once at
    load; the originals may be dropped afterwards. `activations`: the dtype that it will meet, which its biases have: by default
    that of plain numbers, float32 for what is quantised.

    Raises NotImplementedError where no kernel takes the formats (`linear_refusal`), ValueError for numbers it cannot keep."""
    parts = parts_of(stored)
    formats = formats_of(parts)
    dtype = activations or parts[0].format.dtype or torch.float32
    made: LinearWeight = _prepare_linear.runs[parts[0].weight.device, dtype, None, 0, formats](stored)
    return made


def linear_refusal(formats: Iterable[WeightFormat], activations: torch.dtype, device: torch.device) -> str | None:
    """Why `prepare_linear` takes no rows so written, for activations of this dtype on the device; None where it does."""
    case = ShapeClass(device.type, activations, weight=tuple(formats), capability=capability(device))
    return _prepare_linear.refusal(case)


def embedding_refusal(formats: Iterable[WeightFormat], activations: torch.dtype, device: torch.device) -> str | None:
    """Return why the formats cannot be an embedding, whose rows are read one by one, or None; see `linear_refusal`."""
    formats = tuple(formats)
    if not CODED.isdisjoint(formats) or (device.type != "cpu" and any(each.dtype is None for each in formats)):
        return "an embedding's rows are read as plain numbers"
    return linear_refusal(formats, activations, device)


def linear(x: Tensor | RoundedRows, w: LinearWeight) -> Tensor:
    """x [T, K] -> x @ weight.T + bias, [T, N], in the dtype the weight was prepared for. T may be 0. Rounded rows are those of
    `normed_for(..., w)`."""
    return w.matmul_rounded(x) if isinstance(x, RoundedRows) else w.matmul(x)


def normed_for(
    w: LinearWeight, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> Tensor | RoundedRows:  # fmt: skip
    """Return `rms_norm(residual, weight, eps)`, or with x `add_rms_norm(x, residual, weight, eps)`, for a linear layer of
    `w` only: rounded in the same pass if that layer would round it."""
    return w.normed(x, residual, weight, eps)


def activated_linear(x: Tensor, w: LinearWeight, activation: str) -> Tensor:
    """activate(linear(x, w), activation), x [T, K] -> [T, N]."""
    out = w.activated_matmul(x, activation)
    return activate(w.matmul(x), activation) if out is None else out


def gated_linear(x: Tensor, w: LinearWeight, activation: str = "silu") -> Tensor:
    """gated(linear(x, w), activation), x [T, K] -> [T, N / 2]: rows of w are gates, then as many ups."""
    if activation != "silu":
        return gated(w.matmul(x), activation)
    out = w.gated_matmul(x)
    return silu_mul(w.matmul(x)) if out is None else out


def gated_mlp(x: Tensor | RoundedRows, gate_up: LinearWeight, down: LinearWeight, activation: str = "silu") -> Tensor:
    """linear(gated_linear(x, gate_up, activation), down), x [T, K] -> [T, down's N]."""
    if activation != "silu":
        return down.matmul(gated(linear(x, gate_up), activation))
    inner = gate_up.gated_matmul_rounded(x) if isinstance(x, RoundedRows) else gate_up.gated_matmul(x)
    return down.matmul_of_gated(linear(x, gate_up)) if inner is None else down.matmul(inner)


def prepare_heads(weight: Tensor) -> HeadsWeight:
    """Bring a matrix for each head, weight [heads, N, K], into the form that the chosen kernel reads."""
    return _prepare_heads.runs[weight.device, weight.dtype](weight)


def linear_by_head(x: Tensor, w: HeadsWeight) -> Tensor:
    """x [T, heads, K], each head times its own matrix -> [T, heads, N]."""
    return w.matmul(x)
