"""A long prompt, or many, prepared off the loop for the engine: their ids checked, and hashed as the prefix cache's blocks are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from runtime.api import Adapter, MediaItem, PreparedPrompt
from server.http.offload import SHORT_CHARS, Offload, Pieces
from server.models.model import LoadedModel

LONG_PROMPT = SHORT_CHARS  # tokens: to check and hash them is about as much work as to tokenise so many characters
PIECE_TOKENS = 16 * LONG_PROMPT  # of short prompts, behind which other callers have their turn


async def prepared(
    loaded: LoadedModel,
    offload: Offload,
    ids: Sequence[int],
    salt: str | None,
    media: tuple[MediaItem, ...] = (),
    adapter: Adapter | None = None,
) -> PreparedPrompt | None:
    """A long prompt checked and hashed on a thread, so that to submit it costs the loop next to nothing; None for a short one."""
    (made,) = await all_prepared(loaded, offload, [ids], salt, media, adapter)
    return made


async def all_prepared(
    loaded: LoadedModel,
    offload: Offload,
    prompts: Sequence[Sequence[int]],
    salt: str | None,
    media: tuple[MediaItem, ...] = (),
    adapter: Adapter | None = None,
) -> Sequence[PreparedPrompt | None]:
    """The same of the prompts of one request, which are submitted together: None for each where they are short together."""
    num_tokens = sum(map(len, prompts))
    if num_tokens <= LONG_PROMPT:
        return [None] * len(prompts)
    prepare = partial(loaded.engine.prepare, cache_salt=salt, adapter=adapter or loaded.adapter, media=media)

    def pieces() -> Pieces[list[PreparedPrompt]]:
        made: list[PreparedPrompt] = []
        since_rest = 0
        for ids in prompts:
            since_rest += len(ids)
            if since_rest > PIECE_TOKENS and made:
                since_rest = 0
                yield
            made.append(prepare(ids))
        return made

    return await offload.run_pieces(num_tokens, pieces())
