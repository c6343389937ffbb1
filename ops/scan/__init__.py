"""Scans of state space models along each sequence.

A recurrent layer's state of a sequence is an entry of `states` [num_states, ...] float32, whose inner dims are contiguous.
Request r of the step (`meta`, padded with empty ones) uses entry state_indices[r], int64, -1 for none. At the start of a
sequence the entry is treated as zeros; after the step it is the state after the request's last token."""

from __future__ import annotations

from torch import Tensor

from ops import backends
from ops.attention.meta import AttentionMeta
from ops.scan import reference
from ops.scan.reference import ScanHeads

_state_space_scan = backends.on_gpus(
    "state_space_scan", "ops.scan.triton_scan:state_space_scan", reference.state_space_scan
)
_selective_scan = backends.on_gpus(
    "selective_scan", "ops.scan.triton_selective:selective_scan", reference.selective_scan
)


def state_space_scan(
    xbc: Tensor, dt: Tensor, heads: ScanHeads, states: Tensor, state_indices: Tensor, meta: AttentionMeta
) -> Tensor:
    """Compute Mamba-2's scan (Dao and Gu 2024), [T, heads * P]: with s = softplus(dt + dt_bias), a head's state [P, N] becomes
    exp(s * a) * state + s * x B^T, and yields state C + d * x.

    xbc [T, heads * P + 2 * groups * N]: x, B and C, contiguous; dt [T, heads]. Rows may be strided."""
    return _state_space_scan.runs[xbc.device, xbc.dtype](xbc, dt, heads, states, state_indices, meta)


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, gate: Tensor, states: Tensor, state_indices: Tensor,
    meta: AttentionMeta,
) -> Tensor:  # fmt: skip
    """Compute Mamba's scan (Gu and Dao 2023), [T, I]: with s = softplus(dt), a channel's state [N] becomes exp(s * a) * state +
    s * x B, and yields (state C + d * x) * silu(gate).

    x, dt and gate [T, I]; b and c [T, N], of all channels; a [I, N] (below 0) and d [I] float32. Rows may be strided."""
    run = _selective_scan.runs[x.device, x.dtype]
    return run(x, dt, b, c, a, d, gate, states, state_indices, meta)
