"""LoRA adapters that may be loaded while the server runs. They must be below the folder that the administrator configures.

Every symbolic link in a path, and in an adapter's files, is resolved before this check. The engine reads and checks the adapter."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runtime.api import Adapter, AdapterClient, AdapterRefused
from server.media.limits import MODALITIES, read_object

_CONFIG = "adapter_config.json"  # by which a folder is known to be an adapter's
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)?")
MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """Adapter to load at start: value of --lora-modules, as name=path or as JSON with `name` and `path`."""

    name: str
    path: str

    @classmethod
    def parse(cls, text: str) -> AdapterModule:
        """Parse one --lora-modules value. Raises ValueError."""
        if not text.lstrip().startswith("{"):
            name, found, path = text.partition("=")
            if not (found and name.strip() and path.strip()):
                raise ValueError(f"{text!r} is not name=path")
            return cls(name.strip(), path.strip())
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is not JSON: {error}") from None
        if unknown := given.keys() - {"name", "path", "base_model_name"}:
            raise ValueError(f"{text!r}: unknown key {sorted(unknown)[0]!r}; allowed: name, path and base_model_name")
        name, path = given.get("name"), given.get("path")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise ValueError(f"{text!r} needs a name and a path")
        return cls(name, path)

    @classmethod
    def all_of(cls, texts: Iterable[str]) -> list[AdapterModule]:
        """Parse all --lora-modules values. Raises ValueError for an invalid value or a repeated name."""
        found: dict[str, AdapterModule] = {}
        for module in map(cls.parse, texts):
            if module.name in found:
                raise ValueError(f"two adapters are called {module.name!r}")
            found[module.name] = module
        return [*found.values()]


def by_modality(text: str | None) -> dict[str, str]:
    """Parse --default-mm-loras: adapter names or folders by modality, as in vLLM ('{"audio": "name or folder"}'). Raises
    ValueError that names the option."""
    try:
        found = {} if text is None else read_object(text)
        for modality, adapter in found.items():
            if modality not in MODALITIES:
                raise ValueError(f"{modality!r} is not one of {', '.join(MODALITIES)}")
            if not isinstance(adapter, str) or not adapter:
                raise ValueError(f"{modality}: {adapter!r} is neither a name nor a folder")
    except ValueError as error:
        raise ValueError(f"--default-mm-loras: {error}") from None
    return found


def folder_below(root: Path, path: str) -> Path:
    """Return the absolute path of the folder at `path` with all links resolved. A relative `path` starts at `root`. Raises
    ValueError if the folder does not exist, or if the folder or a file in it is outside `root`. Reads the disk."""
    top = root.resolve()
    try:
        folder = (top / path).resolve(strict=True)
        links = [entry.path for entry in os.scandir(folder) if entry.is_symlink()]
        inside = [folder, *(Path(link).resolve(strict=True) for link in links)]
    except (OSError, ValueError, RuntimeError):  # missing, no folder, a name with a zero byte, links in a circle
        raise ValueError(
            f"there is no folder {path!r} with an adapter below the folder of adapters (--lora-dir, --lora-resolver)"
        ) from None
    if folder == top or not all(each.is_relative_to(top) for each in inside):
        raise ValueError(f"{path!r} is outside the folder of adapters (--lora-dir, --lora-resolver)")
    return folder


class Resolver:
    """Loader of adapters that requests name. An adapter is a folder below `root`, called like the adapter."""

    def __init__(self, root: Path, adapters: AdapterClient) -> None:
        self._root, self._adapters = root, adapters
        self._loading = asyncio.Lock()  # loads one at a time; a second request finds the adapter loaded

    async def find(self, name: str) -> Adapter | None:
        """Load and return the adapter in the folder `name`; None without that folder. Raises AdapterRefused if it cannot be
        served."""
        if len(name) > MAX_NAME or _NAME.fullmatch(name) is None:
            return None
        folder = await asyncio.to_thread(self._folder, name)
        if folder is None:
            return None
        async with self._loading:
            known = self._adapters.find(name)
            if known is not None:
                return known
            try:
                return await self._adapters.load(name, str(folder))
            except AdapterRefused as error:
                # Do not reveal the folder of adapters to clients.
                raise AdapterRefused(str(error).replace(str(folder), name)) from error

    def _folder(self, name: str) -> Path | None:
        try:
            folder = folder_below(self._root, name)
        except ValueError:
            return None
        return folder if (folder / _CONFIG).is_file() else None
