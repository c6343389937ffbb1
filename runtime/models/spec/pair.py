"""A model and a draft model, or a draft head, that guesses for it: what is planned is both, what is served is the first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.api import PoolerInfo
from runtime.kv.kinds import MemoryKind, State
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec
from runtime.models.spec.encoder import EncoderSpec
from runtime.models.spec.model import ModelSpec, UnsupportedModel

_ANY_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class PairSpec:
    """A ModelSpec. What `draft` keeps of a sequence stands behind what `model` keeps: both have their KV cache in the blocks of one
    pool, so a block that is freed, shared or found again is so for both."""

    model: ModelSpec
    draft: ModelSpec

    @classmethod
    def of(cls, model: ModelSpec, draft: ModelSpec) -> PairSpec:
        """Raises UnsupportedModel where the one cannot guess for the other."""
        if not (model.generates and draft.generates):
            which = draft if model.generates else model
            raise UnsupportedModel(f"a draft model guesses tokens, and {which.architecture} generates none")
        if model.vocab_size != draft.vocab_size:
            raise UnsupportedModel(
                f"the draft model's vocabulary has {draft.vocab_size} tokens and the model's {model.vocab_size}: they have to be "
                "the same"
            )
        if any(isinstance(kind, State) for kind in draft.memory_kinds()):
            raise UnsupportedModel(
                f"the draft model ({draft.architecture}) has recurrent layers, which cannot take a guess back: no draft model"
            )
        for each, title in ((model, "model"), (draft, "draft model")):
            if any(kind.in_one_step for kind in each.memory_kinds()):
                raise UnsupportedModel(f"the {title} ({each.architecture}) keeps nothing between steps: no draft model")
        return cls(model, draft)

    @classmethod
    def with_head(cls, model: DecoderSpec, head: DraftHeadSpec) -> PairSpec:
        """Return `model` with draft head `head`. The model returns what the head reads."""
        return cls(replace(model, aux_layers=head.reads_layers), head)

    @property
    def architecture(self) -> str:
        return self.model.architecture

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def max_model_len(self) -> int:
        """The longest context that both were made for."""
        return min(self.model.max_model_len, self.draft.max_model_len)

    @property
    def pooler_info(self) -> PoolerInfo:
        return self.model.pooler_info

    @property
    def generates(self) -> bool:
        return True

    @property
    def hands_on(self) -> bool:
        return False

    @property
    def encoder(self) -> EncoderSpec | None:
        return self.model.encoder

    def weights_bytes(self, dtype: str) -> int:
        return self.model.weights_bytes(dtype) + self.draft.weights_bytes(dtype)

    @property
    def draft_share(self) -> float:
        """Bytes of `draft`'s weights for each of `model`'s, of the same dtype: about what it takes to compute a step."""
        return self.draft.weights_bytes(_ANY_DTYPE) / max(1, self.model.weights_bytes(_ANY_DTYPE))

    def memory_kinds(self) -> tuple[MemoryKind, ...]:
        return self.model.memory_kinds() + self.draft.memory_kinds()
