"""Interfaces of a loaded model and of its encoder, for runners. Implemented by our decoder and by transformers' modules."""

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
    passes: EncoderPasses | None  # None: passes run without graphs

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
        """Return the outputs [N, W] of each item, all of one modality, in the model's dtype: N embeddings, then vectors for
        further layers (`EncoderSpec.num_deepstack`). Raises ValueError if an item has another number of positions."""
        ...


class Model(Protocol):
    """Loaded model. `dtype`: of activations, by torch's name; `device`: "cpu" or "cuda". `graph_unsupported_reason`: why its
    steps cannot be captured as CUDA graphs, or None. `may_refuse_capture`: a failed capture is no error, because the modules
    are not ours; steps then run without a graph. `adapters`: its adapter slots, or None. `encoder`: of media, or None."""

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
        """Return new embeddings [T, H] of input_ids [T] int64 for `ForwardStep.input_embeds`. `adapters`: see `ForwardStep`."""
        ...

    def forward(self, step: ForwardStep) -> Any:
        """Compute a step, and return the input of `compute_logits` and `final_hidden`. The tokens' keys and values are
        written to the slots of the step's slot mappings before attention reads them."""
        ...

    def compute_logits(self, hidden: Any, tokens: Tensor | None = None) -> Tensor:
        """Compute the logits [S, V] of `tokens` [S] int64. None: of all tokens; this may overwrite `hidden`."""
        ...

    def final_hidden(self, hidden: Any, tokens: Tensor | slice) -> Tensor:
        """Return the final norm's output [S, H] for `tokens` [S] int64, as input of pooling. A slice may overwrite `hidden`."""
        ...
