"""Platform: interface to one kind of device. It is chosen by name before anything is loaded.

There are two built-in platforms. Others are entry points of the group `oneloop.platforms`: functions without arguments that
return a platform. They are loaded only if --device names them. Torch is not imported before a platform is chosen."""

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
    from runtime.parallel.stages import PipelineStage
    from runtime.runner.worker import Worker
    from runtime.step import Runner

GROUP = "oneloop.platforms"
_BUILT_IN = {"cpu": "cpu:CpuPlatform", "cuda": "cuda:CudaPlatform"}  # modules of this folder

Report = Callable[[LoadProgress], None]


class DeviceMemory(NamedTuple):
    """Memory of a device, in bytes. `free`: available to this process."""

    free: int
    total: int


class Platform(Protocol):
    """One kind of device. `name`: its value for --device. `device`: torch's device type of its tensors.

    Call the methods in this order, on the thread that builds the engine and later computes its steps."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...

    def missing(self) -> str | None:
        """Return why this machine cannot use a device of this kind, or None if it can."""
        ...

    def describe(self) -> str:
        """Return a text that names the device, for users."""
        ...

    def join(self, rank: HostRank) -> Peers:
        """Return the collective operations of `rank`, and make the rank's device the current one of this thread. Called first,
        on the threads of all ranks at the same time."""
        ...

    def stage(self, ways: Ways, num_tensors: int, width: int, plan: EnginePlan) -> PipelineStage:
        """Return a pipeline stage. Called on the stage's thread after `join`, for all stages at the same time.

        The stage sends `num_tensors` tensors of `width` columns to the next stage."""
        ...

    def use(self, device: int) -> None:
        """Make device number `device`, counted from 0, the current device of this thread. Not called for device 0."""
        ...

    def refuse(self, config: EngineConfig) -> None:
        """Raise PlanError if `config` has an option that the platform does not support."""
        ...

    def force_kernels(self, config: EngineConfig) -> None:
        """Apply the kernel options in `config` to `ops`."""
        ...

    def memory(self) -> DeviceMemory: ...

    def topology(self, devices: Sequence[int]) -> str:
        """Return a one-line description of the connections between `devices`, or "" if unknown."""
        ...

    def weights_bytes(self, config: EngineConfig, spec: ModelSpec, stored_bytes: int | None) -> int:
        """Return the bytes of the weights on the device. `stored_bytes`: size of the model's weight files, or None."""
        ...

    def plan(self, config: EngineConfig, spec: ModelSpec, stored_bytes: int | None) -> EnginePlan:
        """Plan the engine before loading. `stored_bytes`: size of the model's weight files, or None. Raises PlanError."""
        ...

    def compile_ahead(self, plan: EnginePlan) -> None:
        """Start compiling kernels in the background."""
        ...

    def out_of_memory_is(self, option: str) -> AbstractContextManager[None]:
        """Return a context manager that converts out-of-memory errors to a PlanError. `option`: what to change, for its message."""
        ...

    def build_runner(
        self, config: EngineConfig, plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], worker: Worker,
        report: Report,
    ) -> tuple[Runner, EnginePlan]:  # fmt: skip
        """Return a runner that has been warmed up, and the final plan. Raises PlanError."""
        ...

    def first_items(self, encoder: Encoder, plan: EnginePlan) -> Sequence[Sequence[MediaItem]]:
        """Return media items for warming up an encoder, grouped by step, or none. Thread-safe. Called after a runner has been
        built."""
        ...

    def release_memory(self) -> None:
        """Return unused memory of allocators to the system, after something large was freed. Thread-safe; call it at any time."""
        ...


def choose_platform(name: str) -> Platform:
    """Return the platform `name`. "auto" selects CUDA if available, else the CPU. Raises PlanError if it is unavailable."""
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
    import_all_of_torch()  # its use of torch is unknown
    return cast("Platform", installed[name].load()())
