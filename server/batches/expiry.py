"""FileExpiry: files go when their time is over, which is looked at when the next one's is, or when that changes.

A file that an unfinished batch reads is nobody's any more, and goes when that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from server.batches.files import FileStore
from server.batches.store import BatchStore

logger = logging.getLogger("oneloop.batch")


class FileExpiry:
    def __init__(self, files: FileStore, batches: BatchStore) -> None:
        self._files = files
        self._batches = batches
        self._changed = asyncio.Event()

    def look_again(self) -> None:
        """A file has come that will expire, or a batch has ended."""
        self._changed.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._changed.clear()
            try:
                wait_s = await self._delete_expired()
            except OSError as error:
                logger.warning("expired files cannot be deleted: %s", error)
                wait_s = None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)

    async def _delete_expired(self) -> float | None:
        """Seconds until the next file expires; None where none will."""
        read = {batch.input_file_id for batch in self._batches.unfinished()}
        for id in self._files.expired() - read:
            await self._files.remove(id)
            logger.info("%s has expired and is deleted", id)
        return self._files.until_next_expiry()
