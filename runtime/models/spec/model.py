"""Protocol of model specs: what is known before weights are read, for any implementation."""

from __future__ import annotations

from typing import Protocol

from runtime.api import PoolerInfo
from runtime.kv.kinds import MemoryKind
from runtime.models.spec.encoder import EncoderSpec
from runtime.weights.rules import WeightsError


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
