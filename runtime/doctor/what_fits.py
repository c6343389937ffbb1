"""Estimates of which models of the catalogue fit in memory and how fast they are, from their sizes and the bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.weights.catalogue import CatalogueModel, catalogue

RESERVE = 0.9  # share of the memory for weights and cache
MIN_KV_TOKENS = 2048  # of a generating model: with fewer it does not count as fitting


@dataclass(frozen=True, slots=True)
class Fit:
    """A model of the catalogue in one of its formats. `kv_tokens`: number of tokens whose KV fits in the memory that the
    weights leave; 0 without a KV cache. `tokens_per_s`: upper bound for one stream, if each token reads the weights once
    (roofline of Williams et al. 2009, batch 1); None if the model does not generate."""

    model: str
    task: str
    format: str
    license: str
    weights_bytes: int
    kv_tokens: int
    tokens_per_s: float | None
    fits: bool


def what_fits(memory_bytes: int, bytes_per_s: float, formats: frozenset[str] | None = None) -> list[Fit]:
    """Return a Fit for each model of the catalogue: in its largest format that fits, or in its smallest format if none does.

    `bytes_per_s`: memory bandwidth of the processor. `formats`: formats that the processor supports; None: all."""
    return [_best(model, memory_bytes, bytes_per_s, formats) for model in catalogue().values()]


def _best(model: CatalogueModel, memory_bytes: int, bytes_per_s: float, formats: frozenset[str] | None) -> Fit:
    kinds = [kind for kind in model.formats if formats is None or kind in formats] or [model.format]
    fits = [
        _fit(model, kind, memory_bytes, bytes_per_s) for kind in sorted(kinds, key=model.weights_bytes, reverse=True)
    ]
    return next((fit for fit in fits if fit.fits), fits[-1])


def _fit(model: CatalogueModel, kind: str, memory_bytes: int, bytes_per_s: float) -> Fit:
    weights_bytes = model.weights_bytes(kind)
    left = int(memory_bytes * RESERVE) - weights_bytes
    generates = model.task == "generate"
    kv_tokens = max(0, left // model.kv_token_bytes) if model.kv_token_bytes else 0
    return Fit(
        model.name, model.task, kind, model.license, weights_bytes, kv_tokens,
        bytes_per_s / model.token_bytes(kind) if generates else None,
        kv_tokens >= MIN_KV_TOKENS if generates else left > 0,
    )  # fmt: skip
