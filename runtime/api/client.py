"""EngineClient: the engine's interface for request handlers."""

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
    """Interface for loading and listing adapters. Called on the event loop; files are read on threads."""

    def all(self) -> Sequence[Adapter]:
        """Return all adapters in the order in which they were added."""
        ...

    def find(self, name: str) -> Adapter | None: ...

    async def load(self, name: str, path: str) -> Adapter:
        """Read an adapter and register it as `name`. An adapter that had this name loses it when this returns; its running
        requests continue.

        Raises AdapterRefused without changing anything."""
        ...

    async def unload(self, name: str) -> bool:
        """Remove `name` and wait for the last request that uses the adapter. Return False if the name does not exist."""
        ...


class EngineClient(Protocol):
    """Interface of an engine. All calls except `prepare` are made on the engine's event loop, and none of them blocks."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def replicas(self) -> Sequence[EngineClient]:
        """Engines between which requests are distributed; a single engine returns itself."""
        ...

    @property
    def adapters(self) -> AdapterClient | None:
        """Adapters of the engine, or None if it serves none."""
        ...

    def prepare(
        self, prompt_ids: Sequence[int], cache_salt: str | None = None, adapter: Adapter | None = None,
        media: tuple[MediaItem, ...] = (),
    ) -> PreparedPrompt:  # fmt: skip
        """Check and hash a prompt for `Request.prepared`, in time proportional to its length. Thread-safe; for long prompts,
        call it outside the event loop's thread.

        Raises ValueError for ids outside the vocabulary."""
        ...

    def submit(self, requests: Sequence[Request], *, continues: bool = False) -> TokenStream:
        """Admit all `requests` or none, and return the stream of their outputs. `continues`: they continue an admitted request,
        so a full queue does not reject them.

        Raises ContextTooLong, Busy or EngineStopped."""
        ...

    def check_room(self, caller: bytes | None) -> None:
        """Raise Busy if `submit` would reject any request of `caller` now, so that a request need not be prepared in vain."""
        ...

    def health(self) -> EngineHealth: ...

    def metrics(self) -> Sequence[Metric]: ...

    def activity(self, *, after_step: int = 0, after_request: int = 0, num_cells: int = 1024) -> Activity:
        """Return recent steps and requests with numbers above `after_step` and `after_request`. `num_cells`: maximum size of
        the KV map."""
        ...

    def when_finished(self, call: Callable[[Finished], None]) -> None:
        """Call `call` for each request that ends from now on, except probes."""
        ...

    def abort(self, ids: Collection[str] | None = None) -> int:
        """End the requests that have a name in `ids`, or all if it is None, with ABORT. Return their number."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes. Running sequences continue, and cache their blocks again from now on."""
        ...

    async def sleep(self, level: SleepLevel = SleepLevel.HOST) -> None:
        """Wait until the engine is idle, then free its memory. The next request wakes it. Raises SleepError."""
        ...

    async def wake_up(self) -> None:
        """Wait until the engine is awake. Raises SleepError if its model cannot be loaded again."""
        ...

    async def start_profile(self, path: Path, *, delay_steps: int = 0, num_steps: int | None = None) -> None:
        """Record computation and the event loop into a gzipped trace in Chrome's format.

        Recording starts now, or after `delay_steps` settled steps, and ends after `num_steps` more or at `stop_profile`.
        Returns when recording has started, at once if it is delayed. Raises ProfileError."""
        ...

    async def stop_profile(self) -> Path:
        """End the running profile, if there is one, and return the path of the last profile once it is written.

        Raises ProfileError."""
        ...

    async def drain(self, timeout_s: float) -> int:
        """Reject new requests, wait for admitted ones, and abort the rest after `timeout_s`. Return the number of aborted
        requests."""
        ...

    async def probe(self) -> None:
        """Wait until a step settles. An idle engine computes a step of one token for this.

        Raises ProbeFailed or EngineStopped. It has no time limit of its own, so the caller must set one."""
        ...

    async def death(self) -> str:
        """Wait until the engine can never serve again, and return the reason. All its requests have ended by then."""
        ...

    async def close(self, limit_s: float = ...) -> bool:
        """Abort remaining requests and shut down, within about `limit_s`. Return False if something hangs, such as a step."""
        ...
