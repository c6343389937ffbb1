"""The engine as handlers see it."""

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
    """The adapters that requests may name. On the event loop; files are read on threads."""

    def all(self) -> Sequence[Adapter]:
        """Return all adapters in the order in which they were added."""
        ...

    def find(self, name: str) -> Adapter | None: ...

    async def load(self, name: str, path: str) -> Adapter:
        """Read an adapter and give it this name. One that has the name already has lost it when this returns: who runs with it goes
        on with it.

        Raises AdapterRefused, and nothing has changed."""
        ...

    async def unload(self, name: str) -> bool:
        """Take the name away and wait for the last request that has the adapter. False where there is no such name."""
        ...


class EngineClient(Protocol):
    """The engine as handlers see it. All calls but `prepare` happen on the event loop that owns it; none of them blocks."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def replicas(self) -> Sequence[EngineClient]:
        """The engines that requests are shared out to; itself alone where there is one."""
        ...

    @property
    def adapters(self) -> AdapterClient | None:
        """Adapters of the engine, or None if it serves none."""
        ...

    def prepare(
        self, prompt_ids: Sequence[int], cache_salt: str | None = None, adapter: Adapter | None = None,
        media: tuple[MediaItem, ...] = (),
    ) -> PreparedPrompt:  # fmt: skip
        """The part of `submit` that grows with a prompt, for `Request.prepared`. May be called on any thread, and should be on
        another than the loop's where the prompt is long.

        Raises ValueError for ids that are no tokens of the model."""
        ...

    def submit(self, requests: Sequence[Request], *, continues: bool = False) -> TokenStream:
        """Admit all of them or none. `continues`: they are the next part of what was admitted before, so they are not refused for
        a full queue.

        Raises ContextTooLong, Busy or EngineStopped."""
        ...

    def check_room(self, caller: bytes | None) -> None:
        """Raise Busy if `submit` would reject any request of `caller` now, so that a request need not be prepared in vain."""
        ...

    def health(self) -> EngineHealth: ...

    def metrics(self) -> Sequence[Metric]: ...

    def activity(self, *, after_step: int = 0, after_request: int = 0, num_cells: int = 1024) -> Activity:
        """The steps and requests behind those numbers, as far as they are remembered; `num_cells`: of the map, at most."""
        ...

    def when_finished(self, call: Callable[[Finished], None]) -> None:
        """Call `call` for each request that ends from now on, except probes."""
        ...

    def abort(self, ids: Collection[str] | None = None) -> int:
        """End requests that have one of these names, or all, with ABORT, which their readers get; how many there were."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes. Running sequences continue, and cache their blocks again from now on."""
        ...

    async def sleep(self, level: SleepLevel = SleepLevel.HOST) -> None:
        """Give memory back once nothing is left to do, and return then. The next request wakes it.

        Raises SleepError."""
        ...

    async def wake_up(self) -> None:
        """Return when it does not sleep any more. Raises SleepError where its model cannot be loaded again."""
        ...

    async def start_profile(self, path: Path, *, delay_steps: int = 0, num_steps: int | None = None) -> None:
        """Record computation and the event loop into a gzipped trace in Chrome's format.

        Recording starts now, or after `delay_steps` settled steps, and ends after `num_steps` more or at `stop_profile`.
        Returns when recording has started, at once if it is delayed. Raises ProfileError."""
        ...

    async def stop_profile(self) -> Path:
        """Return when the profile was written: the one that is recorded, which ends, or that has ended by itself.

        Raises ProfileError."""
        ...

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, wait for the admitted ones, abort what is left after `timeout_s`; how many were aborted."""
        ...

    async def probe(self) -> None:
        """Return when a step has settled from now on: others', where there is work, else one of a single token of its own.

        Raises ProbeFailed or EngineStopped. As slow as the device is: the caller sets a limit."""
        ...

    async def death(self) -> str:
        """Return the reason when the engine can never serve again. All its requests have ended by then."""
        ...

    async def close(self, limit_s: float = ...) -> bool:
        """Abort remaining requests and shut down, within about `limit_s`. Return False if something hangs, such as a step."""
        ...
