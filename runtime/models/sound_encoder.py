"""Audio encoder of speech models, computed by our own blocks. Its outputs are read by the decoder's cross-attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import ops
from runtime.api.media import MediaItem
from runtime.config import WeightPolicy
from runtime.kv.kv_cache import LayerKV
from runtime.models.blocks.weights import Weights
from runtime.models.decoder import Decoder
from runtime.models.forward_step import ForwardStep
from runtime.models.load import opened, read_weights
from runtime.models.model import EncoderPasses
from runtime.models.spec.model import EncoderSpec
from runtime.models.spec.sound import KERNEL, SoundEncoderSpec
from runtime.weights.rules import Checkpoint, Report

_MAX_WINDOWS = 8  # per pass, to limit the memory of activations


class SoundEncoder:
    """Implementation of `Encoder` for windows of audio as described by `spec.speech`."""

    def __init__(self, spec: EncoderSpec, own: SoundEncoderSpec, weights: Weights, dtype: str, device: str) -> None:
        assert spec.speech is not None
        self.spec, self._own, self._speech = spec, own, spec.speech
        self.passes: EncoderPasses | None = None
        self._dtype, self._device = getattr(torch, dtype), torch.device(device)
        layers = Decoder.build(own, weights, dtype=dtype, device=device, max_positions=own.max_model_len)
        self.num_parameters, self.weights_bytes = layers.num_parameters, layers.weights_bytes
        self._convolutions = [weights.linears[linear.name] for linear in own.convolutions]
        self._caches = [LayerKV(())] * len(own.layers)
        self._layers = layers.traced(self._caches)

    def samples(self, max_tokens: int) -> list[list[MediaItem]]:
        """Return two groups of silent windows for warm-up: one window, and a full batch. See `Encoder`."""
        num = min(_MAX_WINDOWS, max(1, max_tokens // self.spec.num_outputs))
        silence = self._speech.silence()
        several = [replace(silence, digest=silence.digest + bytes([number])) for number in range(num)]
        return [several[:1], several][: 1 if num == 1 else 2]

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return the outputs [num_outputs, H] of each window, see `Encoder`."""
        outputs: list[Tensor] = []
        for first in range(0, len(items), _MAX_WINDOWS):
            features = np.stack([item.inputs["input_features"] for item in items[first : first + _MAX_WINDOWS]])
            inputs = {"features": torch.from_numpy(features).to(self._device)}
            num_outputs = len(features) * self.spec.num_outputs
            key = b"windows%d" % len(features)
            encoded = (
                self._encode(inputs) if self.passes is None else self.passes.run(key, num_outputs, inputs, self._encode)
            )
            outputs.extend(encoded.view(len(features), self.spec.num_outputs, -1))
        return outputs

    def _encode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return outputs [N * num_outputs, H] of mel features [N, num_mel_bins, num_frames] float32."""
        features = inputs["features"]
        num, length = len(features), self.spec.num_outputs
        first, second = self._convolutions
        x = self._convolved(features.transpose(1, 2), first, 1).to(self._dtype)
        x = self._convolved(x.view(num, -1, self._own.hidden_size), second, 2)
        device = x.device
        starts = torch.arange(num + 1, dtype=torch.int32, device=device) * length
        lens = torch.full((num,), length, dtype=torch.int32, device=device)
        spans = tuple((index * length, (index + 1) * length, length) for index in range(num))
        meta = ops.AttentionMeta(starts, lens, lens.new_empty(num, 0), length, length, spans=spans)
        positions = torch.arange(length, device=device).repeat(num)
        nowhere = torch.full_like(positions, -1)
        step = ForwardStep(positions, positions, (nowhere,), (meta,), self._caches, input_embeds=x)
        return self._layers.final_hidden(self._layers.forward(step), slice(None))

    def _convolved(self, x: Tensor, weight: ops.LinearWeight, stride: int) -> Tensor:
        """Return the convolution of x [N, T, C] over T, zero-padded, followed by the activation: [N, T / stride, H]."""
        num, length, channels = x.shape
        padded = x.new_zeros(num, length + KERNEL - 1, channels)
        padded[:, 1:-1] = x
        windows = padded.as_strided(
            (num, length // stride, KERNEL * channels), (padded.stride(0), stride * channels, 1)
        )
        return ops.activated_linear(windows.reshape(-1, KERNEL * channels), weight, self._own.activation.value)


def load(
    spec: EncoderSpec, files: Checkpoint, *, dtype: str, load_format: str, seed: int, progress: Report, device: str,
    weights: WeightPolicy,
) -> SoundEncoder:  # fmt: skip
    """Load an audio encoder. Arguments are those of `load.load_model`. Raises WeightsError if config and weights do not match."""
    own = spec.own
    assert isinstance(own, SoundEncoderSpec), "no others are described"
    with opened(own, files, dtype=dtype, load_format=load_format, seed=seed, device=device, policy=weights) as reader:
        read = read_weights(own, reader, dtype=dtype, device=device, progress=progress)
    return SoundEncoder(spec, own, read, dtype, device)
