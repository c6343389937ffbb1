"""Interface of model specs: facts that are known before weights are read, for native models and those run through transformers."""

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

    `modalities`: the served ones of "image", "audio", "video". `stored_below`: name prefix of its tensors in checkpoints.
    `config`: config.json of the whole model. `whole_items`: all tokens of an item attend to each other, so an item is never
    split. `num_deepstack`: extra vectors that the first layers add to their outputs, one each (Qwen3-VL, 2025). `is_packed`:
    one call takes patches of several items, with the grid of each. `rope_positions`: positions of tokens for a rotary embedding
    of three axes. `multiplier`: output scale, if the decoder scales embeddings. `apart`: audio is encoded differently when
    images are present, see `media.beside_pictures`.

    `num_outputs`: outputs per item, if the decoder reads them by cross-attention instead of as embeddings; every prompt then
    has one item. `own`: the encoder in our own layers, without a class of transformers. `speech`: audio input of a speech
    model."""

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
    """Error of a config that uses an unsupported option or is invalid."""


class ModelSpec(Protocol):
    """Description of a model before its weights are read, for native models and those run through transformers.

    `max_model_len`: longest context in tokens. `generates`: it computes logits, from which tokens are sampled. `hands_on`:
    its hidden states only go to the next pipeline stage. `encoder`: media encoder, if prompts may contain media."""

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
        """Return the bytes of all parameters, stored as `dtype`."""
        ...

    def memory_kinds(self) -> tuple[MemoryKind, ...]:
        """Return the kind of memory that each attention or recurrent layer needs per sequence, in the order of a forward
        pass. Dtypes may be undecided."""
        ...
