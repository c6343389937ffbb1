"""LoRARequest: names the adapter that a request to an LLM uses, as in vLLM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.api import AdapterRefused
from server.http.call import Call
from server.models import lookup
from server.models.model import LoadedModel


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Adapter of a request. `lora_name`: its name. `lora_path`: folder from which it is loaded, unless it is loaded already.
    Without `lora_path`, the name must be in `lora_modules`. `lora_int_id` exists for compatibility with vLLM and has no effect.
    Raises ValueError."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.lora_name, str) and self.lora_name):
            raise ValueError("lora_name must not be empty")


def each_lora(given: LoRARequest | Sequence[LoRARequest | None] | None, num: int) -> list[LoRARequest | None]:
    """Return a list with the adapter of each of `num` prompts. `given`: one adapter for all prompts, or a list. Raises
    ValueError."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * num
    if len(given) != num:
        raise ValueError(f"{len(given)} lora_request for {num} prompts: give one, or one for each")
    return [*given]


class LoraNames:
    """Adapters of an engine by the name that programs use. Each adapter is loaded on first use; only one is loaded at a time."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._loading = asyncio.Lock()

    async def model(self, call: Call, asked: LoRARequest | None) -> LoadedModel:
        """Return the model with the adapter `asked`. Raises ValueError if the adapter does not exist, or an ApiError of
        `lookup.named`."""
        if asked is None:
            return self._loaded
        adapters, path = self._loaded.engine.adapters, os.fspath(asked.lora_path)
        if adapters is None:
            raise ValueError(
                f"lora_request {asked.lora_name!r}: adapters are disabled: create the LLM with enable_lora=True"
            )
        if asked.lora_name in self._loaded.all_names:
            raise ValueError(f"lora_request {asked.lora_name!r}: this is a name of the model; choose another")
        async with self._loading:
            known = adapters.find(asked.lora_name)
            if path and (known is None or known.path != path):
                try:
                    await adapters.load(asked.lora_name, path)
                except AdapterRefused as error:
                    raise ValueError(f"lora_request {asked.lora_name!r}: {error}") from None
        return await lookup.named(call, self._loaded, asked.lora_name)
