"""EngineClient: interface of an engine for request handlers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from runtime.api.media import MediaItem
from runtime.api.model import ModelInfo
from runtime.api.outputs import TokenStream
from runtime.api.requests import Adapter, PreparedPrompt, Request
from runtime.api.state import Activity, EngineHealth, Finished, Metric, SleepLevel


class AdapterClient(Protocol):
    """Interface for loading and listing LoRA adapters. Call it on the event loop; files are read on threads."""

    def all(self) -> Sequence[Adapter]:
        """Return all adapters in the order in which they were added."""
        ...

    def find(self, name: str) -> Adapter | None: ...

    async def load(self, name: str, path: str) -> Adapter:
        """Read the adapter in folder `path` and register it as `name`. An adapter that had this name loses it when this returns;
        requests that use the old adapter continue.

        Raises AdapterRefused without changing anything."""
        ...

    async def unload(self, name: str) -> bool:
        """Remove adapter `name` and wait until no request uses the adapter. Return False if `name` does not exist."""
        ...


class EngineClient(Protocol):
    """Interface of an engine. Call its methods on the engine's event loop, except `prepare`. No method blocks the loop."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def replicas(self) -> Sequence[EngineClient]:
        """Engines between which requests are distributed. A single engine returns a list of itself."""
        ...

    @property
    def adapters(self) -> AdapterClient | None:
        """Interface to the engine's LoRA adapters, or None if the engine does not support adapters."""
        ...

    def prepare(
        self, prompt_ids: Sequence[int], cache_salt: str | None = None, adapter: Adapter | None = None,
        media: tuple[MediaItem, ...] = (),
    ) -> PreparedPrompt:  # fmt: skip
        """Check and hash a prompt for `Request.prepared`. This takes time proportional to the prompt's length, and is thread-safe.
        For long prompts, call it on another thread than the event loop's.

        Raises ValueError for token ids outside the vocabulary."""
        ...

    def submit(self, requests: Sequence[Request], *, continues: bool = False) -> TokenStream:
        """Admit all `requests` or none, and return the stream of their outputs. `continues`: the requests continue a request that
        was admitted earlier, so a full queue does not reject them.

        Raises ContextTooLong, Busy or EngineStopped."""
        ...

    def check_room(self, caller: bytes | None) -> None:
        """Raise Busy if `submit` would reject any request of `caller` now. Call this before preparing a long prompt."""
        ...

    def health(self) -> EngineHealth: ...

    def metrics(self) -> Sequence[Metric]: ...

    def activity(self, *, after_step: int = 0, after_request: int = 0, num_cells: int = 1024) -> Activity:
        """Return the recent steps with numbers above `after_step` and requests with numbers above `after_request`. `num_cells`:
        maximum number of cells of the KV map."""
        ...

    def when_finished(self, call: Callable[[Finished], None]) -> None:
        """Call `call` for each request that ends from now on, except probe requests."""
        ...

    def abort(self, ids: Collection[str] | None = None) -> int:
        """End requests with the reason ABORT: those with an id in `ids`, or all if `ids` is None. Return the number of requests."""
        ...

    def reset_prefix_cache(self) -> None:
        """Remove all entries of the prefix cache. Running sequences continue, and cache their blocks again from now on."""
        ...

    async def sleep(self, level: SleepLevel = SleepLevel.HOST) -> None:
        """Wait until the engine is idle, then free its device memory. The next request wakes it. Raises SleepError."""
        ...

    async def wake_up(self) -> None:
        """Wait until the engine is awake. Raises SleepError if its model cannot be loaded again."""
        ...

    async def start_profile(self, path: Path, *, delay_steps: int = 0, num_steps: int | None = None) -> None:
        """Start recording device computation and the event loop as a gzipped Chrome trace in `path`.

        Recording starts now, or after `delay_steps` completed steps. It ends after `num_steps` further steps or at
        `stop_profile`. Returns when recording has started, or at once if `delay_steps` is set. Raises ProfileError."""
        ...

    async def stop_profile(self) -> Path:
        """Stop the running profile, if any. Return the path of the latest profile when it has been written.

        Raises ProfileError."""
        ...

    async def drain(self, timeout_s: float) -> int:
        """Reject new requests and wait for admitted requests to end. Abort those that are left after `timeout_s`, and return
        their number."""
        ...

    async def probe(self) -> None:
        """Wait until a step has completed. If the engine is idle, a step of one token is computed for this.

        Raises ProbeFailed or EngineStopped. This method has no time limit, so the caller must set one."""
        ...

    async def death(self) -> str:
        """Wait until the engine has failed permanently, and return the reason. All its requests have ended by then."""
        ...

    async def close(self, limit_s: float = ...) -> bool:
        """Abort remaining requests and shut down within about `limit_s` seconds. Return False if a step or a thread hangs."""
        ...
