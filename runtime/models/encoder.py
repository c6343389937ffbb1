"""What runners need of a loaded encoder of pictures, sounds or videos, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from runtime.api.media import MediaItem
from runtime.models.spec.encoder import EncoderSpec

Compute: TypeAlias = Callable[[Mapping[str, Tensor]], Tensor]


class EncoderPasses(Protocol):
    """Who runs an encoder's passes, and may do so by a captured graph."""

    def run(self, key: bytes, num_outputs: int, inputs: Mapping[str, Tensor], compute: Compute) -> Tensor:
        """What `compute` makes of `inputs`, all on the device. `key`: of whatever else it hangs on, and of their shapes.
        `num_outputs`: that come of it, or as many as are as much work."""
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
        """Items to try it with, those of a list together, of `max_tokens` outputs at most if there are several; what their outputs
        say is no matter. Of what it cannot make up without a processor there are none."""
        ...

    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Of each item, all of one modality, its outputs [N, W], in the model's dtype: what takes the place of N embeddings, and
        behind it what further layers add (`EncoderSpec.num_deepstack`). Raises ValueError where an item has another number of
        positions."""
        ...
