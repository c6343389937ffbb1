"""Spec of an audio encoder computed by our own blocks: convolutions over time, then full attention over a window of audio
(Whisper, Radford et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.linear import Linear
from runtime.models.spec.mlp import Activation
from runtime.weights.rules import Parameter

KERNEL = 3  # time steps
CONVOLUTIONS = ("model.conv1", "model.conv2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundEncoderSpec(DecoderSpec):
    """Audio encoder: two convolutions, each followed by `activation`, then layers. The first convolution reads `num_mel_bins`
    mel bands in float32; the second has stride 2. There is no vocabulary. `positions` has a row for each output."""

    num_mel_bins: int
    activation: Activation

    @property
    def has_embedding(self) -> bool:
        return False

    @property
    def convolutions(self) -> tuple[Linear, Linear]:
        first, second = CONVOLUTIONS
        return (
            Linear(first, self.hidden_size, KERNEL * self.num_mel_bins, True, float32=True),
            Linear(second, self.hidden_size, KERNEL * self.hidden_size, True),
        )

    def linears(self) -> Iterator[Linear]:
        yield from self.convolutions
        yield from DecoderSpec.linears(self)

    def parameters(self) -> Iterator[Parameter]:
        for linear in self.convolutions:
            yield from linear.parameters()
        yield from DecoderSpec.parameters(self)
