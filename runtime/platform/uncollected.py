"""No collection while steps are captured: in the middle of one it may free what belongs to it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class Uncollected:
    """Nothing is collected while anybody is inside. Any number of threads."""

    def __init__(self) -> None:
        self._lock, self._inside, self._was_enabled = Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_enabled:
                gc.enable()

    @contextmanager
    def after_collecting(self) -> Iterator[None]:
        """What can be is collected before, unless somebody is inside: it may hold memory of the device, which captures take."""
        with self._lock:
            if not self._inside:
                gc.collect()
        with self:
            yield


UNCOLLECTED = Uncollected()
