"""EncoderSpec: what a model sees and hears with, before its weights are read. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.encode.scheduling import RopePositions


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder, and the projector that makes its outputs embeddings, computed by modules of transformers' class `architecture`.

    `modalities`: "image", "audio", "video", those that are served. `stored_below`: how names of its tensors begin in checkpoints.
    `config`: the whole model's, as in config.json. `whole_items`: tokens of an item see each other all, so it is never cut.
    `num_deepstack`: vectors beside an embedding, which the first layers add to their outputs, one each (Qwen3-VL, 2025).
    `is_packed`: it takes patches of several items side by side, each item told by its grid. `rope_positions`: where tokens stand
    for a rotary embedding of three axes, if the decoder has one. `multiplier`: of the outputs, where the decoder multiplies them as
    it does embeddings. `apart`: sounds beside pictures are encoded otherwise than alone, as `media.beside_pictures` tells them."""

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
