"""Specs of recurrent mixers. Their state of a sequence has a fixed size, independent of the sequence's length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.kv.kinds import RecurrentStateSpec, State
from runtime.models.spec.linear import Linear
from runtime.models.spec.norm import RMSNorm
from runtime.weights.rules import Parameter


def _conv_parameters(name: str, channels: int, conv_kernel: int, bias: bool) -> Iterator[Parameter]:
    if bias:
        yield Parameter(f"{name}.bias", (channels,))
    yield Parameter(f"{name}.weight", (channels, 1, conv_kernel))


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2 mixer (Dao and Gu 2024): a convolution over the last `conv_kernel` tokens, then a state space scan (`ops.ScanHeads`).

    The output is multiplied by SiLU of a gate. `norm`: norm of each group, after the gate if `gate_first`, else before the gate.
    `bias`, `output_bias`: input and output projection have a bias. `multipliers`: factors of gate, x, B, C and dt in the output
    of the input projection."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_kernel: int
    norm: RMSNorm | None
    bias: bool = False
    conv_bias: bool = True
    output_bias: bool = False
    gate_first: bool = True
    multipliers: tuple[float, float, float, float, float] | None = None

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def channels(self) -> int:
        """Number of convolved channels: those of x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def memory_kind(self) -> State:
        return State(
            RecurrentStateSpec(
                ((self.conv_kernel - 1, self.channels), (self.num_heads, self.head_size, self.state_size))
            )
        )

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Return the input projection, whose outputs are gate, channels and dt, and the output projection."""
        into = self.inner_size + self.channels + self.num_heads
        return (
            Linear(f"{layer}.mamba.in_proj", into, hidden_size, self.bias),
            Linear(f"{layer}.mamba.out_proj", hidden_size, self.inner_size, self.output_bias),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        yield from _conv_parameters(f"{layer}.mamba.conv1d", self.channels, self.conv_kernel, self.conv_bias)
        for name in ("A_log", "D", "dt_bias"):
            yield Parameter(f"{layer}.mamba.{name}", (self.num_heads,), float32=True)
        if self.norm is not None:
            yield from self.norm.parameters(f"{layer}.mamba.norm", self.inner_size)


@dataclass(frozen=True, slots=True)
class Mamba:
    """Mamba mixer: a state space scan of each channel (Gu and Dao 2023). A channel's state has `state_size` dims, which decay at
    separate rates. `rank`: number of dims from which dt is projected. `norm`: norm of these dims, of B and of C; `norm_weights`:
    the norms have weights. `bias`: input and output projection have a bias."""

    inner_size: int
    state_size: int
    rank: int
    conv_kernel: int
    norm: RMSNorm | None = None
    norm_weights: bool = True
    bias: bool = False
    conv_bias: bool = True

    @property
    def memory_kind(self) -> State:
        return State(RecurrentStateSpec(((self.conv_kernel - 1, self.inner_size), (self.inner_size, self.state_size))))

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Return four projections: from the input to x and gate, to the output, from x to dt's dims, B and C, and from dt's dims
        to all channels."""
        name, inner = f"{layer}.mamba", self.inner_size
        return (
            Linear(f"{name}.in_proj", 2 * inner, hidden_size, self.bias),
            Linear(f"{name}.out_proj", hidden_size, inner, self.bias),
            Linear(f"{name}.x_proj", self.rank + 2 * self.state_size, inner),
            Linear(f"{name}.dt_proj", inner, self.rank, bias=True),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        name = f"{layer}.mamba"
        yield from _conv_parameters(f"{name}.conv1d", self.inner_size, self.conv_kernel, self.conv_bias)
        yield Parameter(f"{name}.A_log", (self.inner_size, self.state_size), float32=True)
        yield Parameter(f"{name}.D", (self.inner_size,), float32=True)
        if self.norm is not None and self.norm_weights:
            yield from self.norm.parameters(f"{name}.dt_layernorm", self.rank)
            yield from self.norm.parameters(f"{name}.b_layernorm", self.state_size)
            yield from self.norm.parameters(f"{name}.c_layernorm", self.state_size)


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Linear attention with the gated delta rule (Yang et al. 2024). q, k and v are convolved over `conv_kernel` tokens, then
    update the state as in `ops.DeltaHeads`. `norm`: norm of each head's output, which is then multiplied by SiLU of a gate."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_kernel: int
    norm: RMSNorm

    @property
    def inner_size(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Number of convolved channels: those of q, k and v."""
        return 2 * self.num_key_heads * self.key_size + self.inner_size

    @property
    def memory_kind(self) -> State:
        return State(
            RecurrentStateSpec(
                ((self.conv_kernel - 1, self.channels), (self.num_value_heads, self.key_size, self.value_size))
            )
        )

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Return three projections: to q, k, v and gate, to the output, and to b and a of each head."""
        name, sizes = f"{layer}.linear_attn", (self.channels, self.inner_size)
        return (
            Linear(f"{name}.in_proj_qkvz", sum(sizes), hidden_size, parts=sizes),
            Linear(f"{name}.out_proj", hidden_size, self.inner_size),
            Linear(f"{name}.in_proj_ba", 2 * self.num_value_heads, hidden_size, parts=(self.num_value_heads,) * 2),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        name = f"{layer}.linear_attn"
        yield from _conv_parameters(f"{name}.conv1d", self.channels, self.conv_kernel, bias=False)
        for each in ("A_log", "dt_bias"):
            yield Parameter(f"{name}.{each}", (self.num_value_heads,), float32=True)
        yield from self.norm.parameters(f"{name}.norm", self.value_size)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Short convolution that computes c * conv(b * x), where b, c and x are projections of the input. It spans `conv_kernel`
    tokens."""

    conv_kernel: int
    size: int
    bias: bool = False

    @property
    def memory_kind(self) -> State:
        return State(RecurrentStateSpec(((self.conv_kernel - 1, self.size),)))

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Return the projection to b, c and x, and the output projection."""
        return (
            Linear(f"{layer}.conv.in_proj", 3 * self.size, hidden_size, self.bias),
            Linear(f"{layer}.conv.out_proj", hidden_size, self.size, self.bias),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        yield from _conv_parameters(f"{layer}.conv.conv", self.size, self.conv_kernel, self.bias)


Recurrent = Mamba2 | Mamba | GatedDeltaNet | ShortConv
