"""Adapters by name: load, replace and unload them while requests run. Files are read on threads; all other work runs on the event
loop.

A name refers to a version of an adapter. Loading under an existing name creates a new version; running requests keep the old
one. Does not import torch, because the store owns the tensors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, Self

from runtime.api import Adapter, AdapterRefused
from runtime.config import LoraLimits
from runtime.lora.slots import AdapterSlots
from runtime.weights.rules import WeightsError

log = logging.getLogger("oneloop.lora")


class Facts(Protocol):
    @property
    def base(self) -> str: ...
    @property
    def max_rank(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...


class Store(Protocol):
    def read(self, key: int, path: str) -> Facts:
        """Load the adapter in folder `path` into memory as `key`. Thread-safe and slow. Raises WeightsError."""
        ...

    def drop(self, key: int) -> None:
        """Remove adapter `key` from memory."""
        ...

    def has(self, key: int) -> bool:
        """Return True if adapter `key` is in memory."""
        ...

    def leave(self) -> None:
        """Release all adapters and the model. Until `enter`, `read` only checks adapters."""
        ...

    def enter(self, fresh: Self) -> None:
        """Use the model of the store `fresh` from now on."""
        ...

    def forget(self, key: int) -> None:
        """Remove adapter `key`, which will not be requested again."""
        ...


class Adapters:
    """Implementation of AdapterClient. `slots`: assignment of device slots, used by the scheduler."""

    def __init__(self, limits: LoraLimits, store: Store) -> None:
        self._store = store
        self.slots = AdapterSlots(limits, self._begin_load, store.drop)
        self._names: dict[str, Adapter] = {}
        self._paths: dict[int, str] = {}
        self._num_versions = 0
        self._loading: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._fail: Callable[[int, str], None] = lambda key, why: None

    def connect(self, wake: Callable[[], None], fail: Callable[[int, str], None]) -> None:
        """Set callbacks. `wake()` is called when an awaited adapter was loaded, `fail(key, why)` if it cannot be loaded."""
        self._wake, self._fail = wake, fail

    def all(self) -> Sequence[Adapter]:
        return [*self._names.values()]

    def find(self, name: str) -> Adapter | None:
        return self._names.get(name)

    async def load(self, name: str, path: str, *, key: int | None = None) -> Adapter:
        """Load an adapter, see `AdapterClient.load`. `key`: key of the version, if another engine has already assigned one."""
        async with self._changing:
            self._num_versions = key = self._num_versions + 1 if key is None else key
            began_s = time.monotonic()
            reading = asyncio.ensure_future(asyncio.to_thread(self._store.read, key, path))
            try:
                facts = await asyncio.shield(reading)
            except asyncio.CancelledError:
                reading.add_done_callback(partial(self._give_up, key))
                raise
            except WeightsError as error:
                self._store.forget(key)
                raise AdapterRefused(str(error)) from error
            adapter = Adapter(
                name, key, path, facts.base, facts.max_rank, facts.num_parameters, created=int(time.time())
            )
            before = self._names.get(name)
            self._paths[key] = path
            self.slots.add(key, name, in_memory=self._store.has(key))
            self._names[name] = adapter
            log.info(
                "adapter %s: rank %d, %d numbers, from %s in %.2f s",
                name,
                adapter.max_rank,
                adapter.num_parameters,
                path,
                time.monotonic() - began_s,
            )
            if before is not None:
                self._retire(before)
            return adapter

    async def unload(self, name: str) -> bool:
        adapter = self._names.pop(name, None)
        if adapter is None:
            return False
        unused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._retire(adapter, lambda: None if unused.done() else unused.set_result(None))
        await unused
        log.info("adapter %s is unloaded", name)
        return True

    def _give_up(self, key: int, read: asyncio.Future[Facts]) -> None:
        """Discard adapter `key`, whose loading was cancelled. Ignore errors of reading it."""
        if not read.cancelled():
            read.exception()
        self._store.forget(key)

    def sleep(self) -> None:
        """Release all adapters with the model. Names are kept. Files are read again at the first use after `awake`."""
        self._store.leave()
        self.slots.leave()

    def awake(self, fresh: Adapters) -> None:
        """Use the newly built model of `fresh`, because the engine has woken."""
        self._store.enter(fresh._store)

    def close(self) -> None:
        for task in self._loading:
            task.cancel()

    def _retire(self, adapter: Adapter, when_unused: Callable[[], None] = lambda: None) -> None:
        def gone() -> None:
            self._store.forget(adapter.key)
            del self._paths[adapter.key]
            when_unused()

        self.slots.retire(adapter.key, gone)

    def _begin_load(self, key: int) -> None:
        task = asyncio.create_task(self._load(key), name=f"adapter {key}")
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def _load(self, key: int) -> None:
        """Load adapter `key`, which was evicted, into memory again."""
        try:
            await asyncio.to_thread(self._store.read, key, self._paths[key])
        except Exception as error:
            log.warning("adapter %d could not be read again: %s", key, error)
            self.slots.failed(key)
            why = str(error) if isinstance(error, WeightsError) else type(error).__name__
            self._fail(key, f"its adapter could not be read again: {why}")
        else:
            if self._store.has(key):
                self.slots.loaded(key)
            else:  # the model was put to sleep meanwhile
                self.slots.failed(key)
            self._wake()
