"""Platform: everything that differs by the kind of device a model runs on. Chosen once, by name, before anything is loaded.

The two built in are named here; another is an entry point of the group `oneloop.platforms`, a function without arguments that gives
one, and is loaded only where --device names it. No torch before one is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from runtime.api import LoadProgress
from runtime.config import EngineConfig, EnginePlan, PlanError
from runtime.torch_import import import_all_of_torch

if TYPE_CHECKING:
    from runtime.api.media import MediaItem
    from runtime.models.model import Encoder, Model
    from runtime.models.spec.model import ModelSpec
    from runtime.parallel.group import HostRank, Peers
    from runtime.parallel.links import Ways
    from runtime.parallel.stages import Stage
    from runtime.runner.worker import Worker
    from runtime.step import Runner

GROUP = "oneloop.platforms"
_BUILT_IN = {"cpu": "cpu:CpuPlatform", "cuda": "cuda:CudaPlatform"}  # files beside this one

Report = Callable[[LoadProgress], None]


class DeviceMemory(NamedTuple):
    """Bytes that this process can still take, and all that the device has."""

    free: int
    total: int


class Platform(Protocol):
    """Kind of device. `name`: its --device name; `device`: torch's name of where tensors are.

    Methods are called in this order, on the thread that builds the engine and later works for it."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...

    def missing(self) -> str | None:
        """Why there is no such device here, None where there is one."""
        ...

    def describe(self) -> str:
        """A name of the device for people."""
        ...

    def join(self, rank: HostRank) -> Peers:
        """Return the exchange between a model's ranks. Called on each rank's own thread, by all at once, first of all: from
        here on the rank's device is this thread's."""
        ...

    def stage(self, ways: Ways, num_tensors: int, width: int, plan: EnginePlan) -> Stage:
        """Return a stage of a model that is cut into several. Called on its own thread, which has joined, by all stages at once.

        It hands on `num_tensors` tensors of `width` columns."""
        ...

    def use(self, device: int) -> None:
        """Compute on the device of that number, counted from 0, on this thread from here on. Called for others than the first."""
        ...

    def refuse(self, config: EngineConfig) -> None:
        """Raises PlanError for an option that it cannot serve."""
        ...

    def force_kernels(self, config: EngineConfig) -> None:
        """Have `ops` choose as the options say."""
        ...

    def memory(self) -> DeviceMemory: ...

    def topology(self, devices: Sequence[int]) -> str:
        """Return a line about the connections of these devices, "" for none."""
        ...

    def weights_bytes(self, config: EngineConfig, spec: ModelSpec, stored_bytes: int | None) -> int:
        """Return the memory of the weights here. `stored_bytes`: their size in the model's files, if there are any."""
        ...

    def plan(self, config: EngineConfig, spec: ModelSpec, stored_bytes: int | None) -> EnginePlan:
        """Plan the engine before loading. `stored_bytes`: size of the files. Raises PlanError."""
        ...

    def compile_ahead(self, plan: EnginePlan) -> None:
        """Begin to make kernels that need a compiler, beside whatever comes next."""
        ...

    def out_of_memory_is(self, option: str) -> AbstractContextManager[None]:
        """Raises PlanError, naming what to change, where the device has no memory left."""
        ...

    def build_runner(
        self, config: EngineConfig, plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], worker: Worker,
        report: Report,
    ) -> tuple[Runner, EnginePlan]:  # fmt: skip
        """A runner that has run, and the plan as it came out. Raises PlanError."""
        ...

    def first_items(self, encoder: Encoder, plan: EnginePlan) -> Sequence[Sequence[MediaItem]]:
        """Return the items to try an encoder with at start, grouped by step; none if a first item is as fast as any. Called
        on any thread, after a runner is built."""
        ...

    def release_memory(self) -> None:
        """Give back to the system what allocators keep for later, after something large was dropped. At any time, on any thread."""
        ...


def choose_platform(name: str) -> Platform:
    """ "auto": a CUDA device where there is one, else the CPU. Raises PlanError where there is no such device or platform."""
    if name == "auto":
        cuda = _load("cuda")
        return _load("cpu") if cuda.missing() else cuda
    platform = _load(name)
    if why := platform.missing():
        raise PlanError(f"device {name} cannot be used: {why}; use --device cpu")
    return platform


def _load(name: str) -> Platform:
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return cast("Platform", getattr(importlib.import_module(f"{__package__}.{module}"), attribute)())
    installed = entry_points(group=GROUP)
    if name not in installed.names:
        known = ", ".join(["auto", *_BUILT_IN, *sorted(installed.names)])
        raise PlanError(f"device {name} is not known; there is {known}")
    import_all_of_torch()  # what it does with torch is not known
    return cast("Platform", installed[name].load()())
