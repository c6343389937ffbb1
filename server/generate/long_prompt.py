"""A long prompt, prepared off the loop for the engine: its ids checked, and hashed as the blocks of the prefix cache are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from runtime.api import Adapter, MediaItem, PreparedPrompt
from server.context.offload import SHORT_CHARS, Offload
from server.loaded.model import LoadedModel

LONG_PROMPT = SHORT_CHARS  # tokens: to check and hash them is about as much work as to tokenise so many characters


async def prepared(
    loaded: LoadedModel,
    offload: Offload,
    ids: Sequence[int],
    salt: str | None,
    media: tuple[MediaItem, ...] = (),
    adapter: Adapter | None = None,
) -> PreparedPrompt | None:
    """A long prompt checked and hashed on a thread, so that to submit it costs the loop next to nothing; None for a short one."""
    if len(ids) <= LONG_PROMPT:
        return None
    return await offload.run(len(ids), partial(loaded.engine.prepare, ids, salt, adapter or loaded.adapter, media))
