"""Profiling session: records one profile at a time. A profile starts and ends on request, or after a number of steps.

A `Recorder` records on its own thread. The methods of `Profiling` are called on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from runtime.api import ProfileError, StepRecord

log = logging.getLogger("oneloop.profile")


class Recorder(Protocol):
    """Recorder of one profile. Its methods block and are called from one thread."""

    def start(self, thread_id: int) -> None:
        """Start recording, including the Python stacks of thread `thread_id`."""
        ...

    def stop(self) -> None: ...

    def write(self, path: Path, steps: Sequence[StepRecord]) -> None:
        """Write the trace to `path`. `steps`: records of the steps that completed during the recording."""
        ...


class Steps(Protocol):
    """Records of an engine's completed steps."""

    @property
    def num_steps(self) -> int: ...

    def steps(self, after: int) -> Sequence[StepRecord]:
        """Return the stored records of steps with numbers above `after`. Old records are no longer stored."""
        ...


class _Profile:
    """One profile. It starts after `delay` completed steps. It ends after `num_steps` more; None: when it is stopped."""

    def __init__(self, path: Path, delay: int, num_steps: int | None) -> None:
        self.path = path
        self.delay = delay
        self.num_steps = num_steps
        self.may_begin, self.began, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.task: asyncio.Task[Exception | None] | None = None  # result: the error that prevented recording, or None
        if not delay:
            self.may_begin.set()

    def settled(self) -> None:
        if self.delay:
            self.delay -= 1
            if not self.delay:
                self.may_begin.set()
        elif self.num_steps and self.began.is_set():
            self.num_steps -= 1
            if not self.num_steps:
                self.may_end.set()

    def end(self) -> None:
        self.may_begin.set()
        self.may_end.set()


class Profiling:
    """Profiles of an engine, one at a time. `make`: function that creates a recorder, called on the recorder's thread."""

    def __init__(self, make: Callable[[], Recorder], steps: Steps) -> None:
        self._make = make
        self._steps = steps
        self._profile: _Profile | None = None  # the last one, until its file is requested

    async def start(self, path: Path, delay_steps: int, num_steps: int | None) -> None:
        """Record a profile to `path`, from `delay_steps` completed steps on, for `num_steps` steps (None: until `stop`).

        Raises ProfileError if another profile is being recorded, or if this one cannot start."""
        if self._profile is not None and self._profile.task is not None and not self._profile.task.done():
            raise ProfileError("a profile is being recorded already; end it first")
        self._profile = profile = _Profile(path, delay_steps, num_steps)
        profile.task = asyncio.create_task(self._record(profile), name="profile")
        if not delay_steps:
            began = asyncio.create_task(profile.began.wait())
            await asyncio.wait({profile.task, began}, return_when=asyncio.FIRST_COMPLETED)
            began.cancel()
            if not profile.began.is_set():
                await self.stop()

    async def stop(self) -> Path:
        """Stop the profile, unless it has already ended, and return the path of its trace.

        Raises ProfileError if there is no profile, or if its trace could not be written."""
        profile = self._profile
        if profile is None or profile.task is None:
            raise ProfileError("no profile is being recorded")
        profile.end()
        await asyncio.wait({profile.task})
        if self._profile is profile:
            self._profile = None
        error = profile.task.result()
        if error is not None:
            raise ProfileError(f"the profile could not be recorded: {error}") from error
        return profile.path

    def settled(self) -> None:
        """Count a completed step for the current profile, if any."""
        if self._profile is not None:
            self._profile.settled()

    async def close(self) -> None:
        if self._profile is not None:
            with contextlib.suppress(ProfileError):
                await self.stop()

    async def _record(self, profile: _Profile) -> Exception | None:
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        with ThreadPoolExecutor(1, "oneloop-profile") as pool:
            try:
                await profile.may_begin.wait()
                recorder = await loop.run_in_executor(pool, self._make)
                await loop.run_in_executor(pool, recorder.start, thread_id)
                first = self._steps.num_steps
                profile.began.set()
                await profile.may_end.wait()
                steps = self._steps.steps(first)
                await loop.run_in_executor(pool, recorder.stop)
                await loop.run_in_executor(pool, recorder.write, profile.path, steps)
            except Exception as error:
                log.exception("a profile could not be recorded")
                return error
        log.info("a profile of %d steps was written to %s", len(steps), profile.path)
        return None
