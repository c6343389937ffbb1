"""Protocol of model specs: what is known before weights are read, for any implementation."""

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
    """An encoder, and the projector that makes its outputs embeddings, computed by modules of transformers' class `architecture`.

    `modalities`: "image", "audio", "video", those that are served. `stored_below`: how names of its tensors begin in checkpoints.
    `config`: the whole model's, as in config.json. `whole_items`: tokens of an item see each other all, so it is never cut.
    `num_deepstack`: vectors beside an embedding, which the first layers add to their outputs, one each (Qwen3-VL, 2025).
    `is_packed`: it takes patches of several items side by side, each item told by its grid. `rope_positions`: where tokens stand
    for a rotary embedding of three axes, if the decoder has one. `multiplier`: of the outputs, where the decoder multiplies them as
    it does embeddings. `apart`: sounds beside pictures are encoded otherwise than alone, as `media.beside_pictures` tells them.
    `num_outputs`: of each item, where the decoder reads them by cross-attention and not in the place of embeddings; every prompt
    has one item then. `own`: the encoder as our own layers compute it, without a class of transformers. `speech`: what it hears."""

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
    """The config asks for what is not implemented, or makes no sense."""


class ModelSpec(Protocol):
    """A model before its weights are read, whoever will compute it. `max_model_len`: the longest context it was made for.
    `generates`: whether it makes logits, from which tokens are sampled. `hands_on`: whether its hidden states go to another stage
    of the model, and nothing else is made of them. `encoder`: of what prompts may have beside text, if anything."""

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
        """Bytes of all parameters, stored as `dtype`."""
        ...

    def memory_kinds(self) -> tuple[MemoryKind, ...]:
        """Return what is kept of a sequence between steps, in the order of a forward pass: an entry for each attention or
        recurrence. Dtypes may be undecided."""
        ...
