"""Estimates of which models a memory holds and how fast they can be: sizes against bytes and bandwidth, by arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.weights.dequantize import FORMATS

BYTES_PER_WEIGHT = {"bf16": 2.0, "fp8": 1.0} | {
    name: FORMATS[name].size / FORMATS[name].weights for name in ("Q8_0", "Q4_K")
}
RESERVE = 0.9  # of the memory, that weights and cache may take together
_KV_ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A dense model, by its published config: parameters, layers, heads of keys and values, their size."""

    name: str
    num_parameters: float
    num_layers: int
    num_kv_heads: int
    head_size: int

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of a token's keys and values in 16 bits."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * _KV_ELEMENT_BYTES


SIZES = (
    ModelSize("Qwen3-0.6B", 0.596e9, 28, 8, 128),
    ModelSize("Qwen3-1.7B", 1.72e9, 28, 8, 128),
    ModelSize("Qwen3-4B", 4.02e9, 36, 8, 128),
    ModelSize("Llama-3.1-8B", 8.03e9, 32, 8, 128),
    ModelSize("Qwen3-14B", 14.8e9, 40, 8, 128),
    ModelSize("Qwen3-32B", 32.8e9, 64, 8, 128),
    ModelSize("Llama-3.3-70B", 70.6e9, 80, 8, 128),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """A model in a memory. `kv_tokens`: what the rest of it holds, 0 where the weights fill it. `tokens_per_s`: of one stream, if a
    token took no longer than reading every weight once (the roofline of Williams et al. 2009, at batch 1)."""

    model: str
    format: str
    weights_bytes: int
    kv_tokens: int
    tokens_per_s: float

    @property
    def fits(self) -> bool:
        return self.kv_tokens > 0


def what_fits(memory_bytes: int, bytes_per_s: float, formats: tuple[str, ...]) -> list[Fit]:
    """Return the models that fit. `bytes_per_s`: memory bandwidth of the processor."""
    fits = []
    for size in SIZES:
        for kind in formats:
            weights_bytes = int(size.num_parameters * BYTES_PER_WEIGHT[kind])
            left = int(memory_bytes * RESERVE) - weights_bytes
            kv_tokens = max(0, left // size.kv_token_bytes)
            fits.append(Fit(size.name, kind, weights_bytes, kv_tokens, bytes_per_s / weights_bytes))
    return fits
