"""Protocols of a loaded model and of its encoder, for runners: our own decoder, or transformers' modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from runtime.api.media import MediaItem
from runtime.kv.kv_cache import LayerKV
from runtime.models.adapters import ModelAdapters
from runtime.models.blocks.pooler import PoolerBlock
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.model import EncoderSpec, ModelSpec

Compute: TypeAlias = Callable[[Mapping[str, Tensor]], Tensor]


class EncoderPasses(Protocol):
    """Execution of an encoder's passes, possibly by captured graphs."""

    def run(self, key: bytes, num_outputs: int, inputs: Mapping[str, Tensor], compute: Compute) -> Tensor:
        """Return `compute(inputs)`, all on the device. `key`: identifies everything else that the result depends on, and the
        shapes. `num_outputs`: number of outputs, or an equal amount of work."""
        ...


class Encoder(Protocol):
    passes: EncoderPasses | None  # None: they run as they are

    @property
    def spec(self) -> EncoderSpec: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def weights_bytes(self) -> int: ...

    def samples(self, max_tokens: int) -> list[list[MediaItem]]:
        """Return groups of artificial items for warm-up, each group to be encoded together, with at most `max_tokens`
        outputs per group of several. Their content is arbitrary. Kinds that need a processor are omitted."""
        ...

    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return the outputs [N, W] of each item, all of one modality, in the model's dtype: N embeddings, followed by what
        further layers add (`EncoderSpec.num_deepstack`). Raises ValueError if an item has another number of positions."""
        ...


class Model(Protocol):
    """Loaded model. `dtype`: of activations, by torch's name; `device`: "cpu" or "cuda". `graph_unsupported_reason`: why its
    steps cannot be captured as CUDA graphs, or None. `may_refuse_capture`: a failed capture is no error, because the modules
    are not ours; steps then run without a graph. `adapters`: its room for them, or None. `encoder`: of media, or None."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def pooler(self) -> PoolerBlock: ...
    @property
    def graph_unsupported_reason(self) -> str | None: ...
    @property
    def may_refuse_capture(self) -> bool: ...
    @property
    def adapters(self) -> ModelAdapters | None: ...
    @property
    def encoder(self) -> Encoder | None: ...

    def traced(self, kv_caches: Sequence[LayerKV]) -> Model:
        """Return the model bound to `kv_caches`, traced into few native calls if possible; otherwise itself."""
        ...

    def embed(self, input_ids: Tensor, adapters: Tensor | None = None) -> Tensor:
        """input_ids [T] int64, adapters as of `ForwardStep` -> [T, H], fresh, as `ForwardStep.input_embeds` takes them."""
        ...

    def forward(self, step: ForwardStep) -> Any:
        """One step, up to what `compute_logits` and `final_hidden` take. The tokens' keys and values are written where the
        step's slot mappings say, then attended to."""
        ...

    def compute_logits(self, hidden: Any, tokens: Tensor | None = None) -> Tensor:
        """Compute the logits [S, V] of `tokens` [S] int64; None: of all, and `hidden` may be overwritten."""
        ...

    def final_hidden(self, hidden: Any, tokens: Tensor | slice) -> Tensor:
        """The final norm's output for `tokens` [S] int64, [S, H]: what pooling reads. Of a slice `hidden` may be overwritten."""
        ...
