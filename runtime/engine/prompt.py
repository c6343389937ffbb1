"""Checks and hashes of prompts. For long prompts they run on a thread, before the event loop receives the prompt.

A thread that held the GIL for a prompt of 131,072 ids would block the event loop. It therefore releases the GIL regularly."""

from __future__ import annotations

import time
from collections.abc import Sequence

from runtime.api import CacheRoot, PreparedPrompt
from runtime.api.media import MediaItem, media_of_blocks
from runtime.kv.prefix_cache import BlockHash, PrefixCache

_PIECE = 4096  # tokens per piece, a millisecond or less


def check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError if `token_ids` is empty or contains an id outside the vocabulary."""
    if not token_ids:
        raise ValueError("a prompt needs at least one token")
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ValueError(f"token ids go from 0 to {vocab_size - 1}")


def prepare(
    cache: PrefixCache, vocab_size: int, token_ids: Sequence[int], root: CacheRoot, media: tuple[MediaItem, ...] = ()
) -> PreparedPrompt:
    """Check and hash a prompt, on any thread. Raises ValueError as `check_ids` does. `root`: see `cache_root`."""
    size = max(1, _PIECE // cache.block_size) * cache.block_size
    hashes: list[BlockHash] = []
    extras = media_of_blocks(media, cache.block_size)
    for start in range(0, max(1, len(token_ids)), size):
        piece = token_ids[start : start + size]
        check_ids(piece, vocab_size)
        if cache.enabled:
            hashes += cache.hash_blocks(piece, root, hashes[-1] if hashes else None, extras, len(hashes))
        if start + size < len(token_ids):
            time.sleep(0)  # lets waiting threads take the GIL
    return PreparedPrompt(token_ids, root, hashes, media)
