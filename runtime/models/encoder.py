"""Protocol of a loaded encoder of images, audio or video, for runners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from runtime.api.media import MediaItem
from runtime.models.spec.encoder import EncoderSpec

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
        """Items to try it with, those of a list together, of `max_tokens` outputs at most if there are several; what their outputs
        say is no matter. Of what it cannot make up without a processor there are none."""
        ...

    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return the outputs [N, W] of each item, all of one modality, in the model's dtype: N embeddings, followed by what
        further layers add (`EncoderSpec.num_deepstack`). Raises ValueError if an item has another number of positions."""
        ...
