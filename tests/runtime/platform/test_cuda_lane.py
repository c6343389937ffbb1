"""CudaLane: how the end of a step is waited for. Without a device: events are objects of the test."""

from __future__ import annotations

from typing import ClassVar

import torch

from runtime.platform.cuda_lane import CudaLane


class Event:
    """The device is done with it once `has_run`."""

    made: ClassVar[list[Event]] = []

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.blocking = blocking
        self.has_run = False
        Event.made.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.has_run

    def synchronize(self) -> None:
        pass


async def test_a_short_step_that_comes_to_an_idle_device_is_watched_for_and_others_are_slept_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    lane = CudaLane(4, 2, torch.device("cpu"))

    async def slept(*, brief: bool) -> bool:
        await lane.finish(lambda: None, brief=brief).done.wait()
        return Event.made[-1].blocking

    assert not await slept(brief=True)
    assert await slept(brief=True)  # the one before it is still being computed
    Event.made[-1].has_run = True
    assert not await slept(brief=True)
    Event.made[-1].has_run = True
    assert await slept(brief=False)
    assert await lane.close()
