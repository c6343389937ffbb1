"""Protocol of a loaded model for runners: our own decoder, or transformers' modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from runtime.kv.kv_cache import LayerKV
from runtime.models.adapters import ModelAdapters
from runtime.models.blocks.pooler import PoolerBlock
from runtime.models.encoder import Encoder
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.model import ModelSpec


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
        """The same model for these caches alone, in as few native calls as `ops.Tracer` allows; it may be itself."""
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
