"""Interfaces of a loaded model and of its media encoder, as runners use them. Our decoder and transformers' modules implement
them."""

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
    """Executor of an encoder's forward passes. It may run them as captured CUDA graphs."""

    def run(self, key: bytes, num_outputs: int, inputs: Mapping[str, Tensor], compute: Compute) -> Tensor:
        """Return `compute(inputs)`; all tensors are on the device. `key`: identifies the input shapes and everything else that
        affects the result. `num_outputs`: number of outputs, or an equal amount of work."""
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
        """Return groups of artificial items for warm-up. Each group is encoded in one call. A group of several items has at most
        `max_tokens` outputs. Media that need a processor are omitted."""
        ...

    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return a tensor [N, W] for each item, in the model's dtype: N embeddings, each followed by vectors for further layers
        (`EncoderSpec.num_deepstack`). All items have one modality. Raises ValueError if N differs from the item's positions."""
        ...


class Model(Protocol):
    """Loaded model.

    - `dtype`: torch's name of the activations' dtype; `device`: "cpu" or "cuda"
    - `graph_unsupported_reason`: why its steps cannot be captured as CUDA graphs; None if they can
    - `may_refuse_capture`: a failed capture is no error, because the modules are not ours; steps then run without a graph
    - `adapters`: its adapter slots, or None; `encoder`: its media encoder, or None"""

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
        """Return the model bound to `kv_caches`, traced into few native calls. Return itself if tracing is unsupported."""
        ...

    def embed(self, input_ids: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Return new embeddings [T, H] of input_ids [T] int64 for `ForwardStep.input_embeds`. `adapters`: see `ForwardStep`."""
        ...

    def forward(self, step: ForwardStep) -> Any:
        """Compute a step. The result is the input of `compute_logits` and `final_hidden`. Keys and values of the step's tokens are
        written to the slots in its slot mappings before attention reads them."""
        ...

    def compute_logits(self, hidden: Any, tokens: Tensor | None = None) -> Tensor:
        """Return the logits [S, V] of `tokens` [S] int64. None means all tokens; `hidden` may then be overwritten."""
        ...

    def final_hidden(self, hidden: Any, tokens: Tensor | slice) -> Tensor:
        """Return the final norm's output [S, H] for `tokens` [S] int64 or a slice. With a slice, `hidden` may be overwritten."""
        ...
