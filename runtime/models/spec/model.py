"""Interface of model specs, which describe a model before its weights are read. Our decoder and transformers' modules implement
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.api import PoolerInfo, SpeechInfo
from runtime.encode.scheduling import RopePositions
from runtime.kv.kinds import MemoryKind
from runtime.weights.rules import WeightsError


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Media encoder and projector, computed by modules of transformers' class `architecture`.

    - `modalities`: supported ones of "image", "audio", "video"; `speech`: audio input of a speech model
    - `stored_below`: name prefixes of the encoder's tensors in checkpoints; `config`: config.json of the whole model
    - `whole_items`: all tokens of an item attend to each other, so an item is never split over steps
    - `num_deepstack`: number of the decoder's first layers that each add a further vector per output (Qwen3-VL, 2025)
    - `is_packed`: one call can encode patches of several items
    - `rope_positions`: function that computes M-RoPE positions
    - `multiplier`: factor of the outputs, if the decoder scales embeddings
    - `apart`: audio is encoded differently if the prompt has images (`media.beside_pictures`)
    - `num_outputs`: outputs per item, if the decoder reads them by cross-attention; every prompt then has one item
    - `own`: spec of an encoder that our own layers compute instead of transformers' modules"""

    architecture: str
    modalities: frozenset[str]
    stored_below: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False, hash=False)
    whole_items: bool = False
    num_deepstack: int = 0
    is_packed: bool = False
    rope_positions: RopePositions | None = None
    multiplier: float = 1.0
    apart: bool = False
    num_outputs: int = 0
    own: ModelSpec | None = None
    speech: SpeechInfo | None = None


class UnsupportedModel(WeightsError):
    """Error: a model's config is invalid or uses an unsupported option."""


class ModelSpec(Protocol):
    """Description of a model before its weights are read, for native models and models run through transformers.

    `max_model_len`: longest context in tokens. `generates`: the model computes logits, from which tokens are sampled.
    `hands_on`: it is a pipeline stage, and its hidden states are sent to the next one. `encoder`: media encoder; None if prompts
    contain text only."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def pooler_info(self) -> PoolerInfo: ...
    @property
    def generates(self) -> bool: ...
    @property
    def hands_on(self) -> bool: ...
    @property
    def encoder(self) -> EncoderSpec | None: ...

    def weights_bytes(self, dtype: str) -> int:
        """Return the size of all parameters in bytes, if they are stored as `dtype`."""
        ...

    def memory_kinds(self) -> tuple[MemoryKind, ...]:
        """Return the memory kind of each attention or recurrent layer, in the order of a forward pass. Their dtypes may be
        undecided."""
        ...
