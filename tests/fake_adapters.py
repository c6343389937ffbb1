"""Adapters without numbers: names and paths, as a server sees an engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from runtime.api import Adapter, AdapterRefused


class FakeAdapters:
    """An AdapterClient. A folder with a file `bad` is refused. `unused`: set while no request has an adapter; `waited_for`: once
    somebody waits for that."""

    def __init__(self, *names: str) -> None:
        self._adapters = {name: Adapter(name, key, created=5) for key, name in enumerate(names, start=1)}
        self._num = len(names)
        self.loaded: list[tuple[str, str]] = []
        self.unused = asyncio.Event()
        self.unused.set()
        self.waited_for = asyncio.Event()

    def all(self) -> Sequence[Adapter]:
        return [*self._adapters.values()]

    def find(self, name: str) -> Adapter | None:
        return self._adapters.get(name)

    async def load(self, name: str, path: str) -> Adapter:
        await asyncio.sleep(0)
        if (Path(path) / "bad").exists():
            raise AdapterRefused(f"{path}: q_proj is of another shape")
        self._num += 1
        self.loaded.append((name, path))
        adapter = self._adapters[name] = Adapter(name, self._num, path, max_rank=4, num_parameters=9, created=7)
        return adapter

    async def unload(self, name: str) -> bool:
        if self._adapters.pop(name, None) is None:
            return False
        self.waited_for.set()
        await self.unused.wait()
        return True
