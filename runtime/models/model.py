"""What runners need of a loaded model, whoever computes it: our own decoder, or transformers' modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

import ops
from runtime.models.blocks.attention import LayerMemory
from runtime.models.spec.model import ModelSpec


class Model(Protocol):
    """`dtype`: of activations, by torch's name; `device`: "cpu" or "cuda". `uncapturable`: why its steps cannot be recorded as
    CUDA graphs, None where they can."""

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
    def uncapturable(self) -> str | None: ...

    def recorded(self, memory: Sequence[LayerMemory]) -> Model:
        """The same model for this memory alone, in as few native calls as `ops.Recorder` allows; it may be itself."""
        ...

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        memory: Sequence[LayerMemory],
        slots: Sequence[Tensor],
        metas: Sequence[ops.AttentionMeta],
    ) -> Any:
        """One step over input_ids and positions [T] int64, up to what `logits` takes. `memory`: one entry for each of
        `ModelSpec.kv_shapes`. The tokens' keys and values are written to the `slots` [T] int64 of the layer's block table,
        then attended to through its entry of `metas`."""
        ...

    def logits(self, hidden: Any, tokens: Tensor | None = None) -> Tensor:
        """`tokens` [S] int64: those whose logits [S, V] are wanted. None: of all, and `hidden` may be overwritten."""
        ...
