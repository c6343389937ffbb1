"""Pipeline stages of one model as Ray actors. This process runs the event loop and the first stage, and starts the other stages.

A placement group has a bundle of CPU cores, and GPUs if any, for each stage. Each bundle is on its own node if the cluster has
enough nodes. The first bundle belongs to this process; in a Ray Serve replica, it is the replica's bundle. Needs Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from server.http import logs
from server.http.offload import limit_arenas, switch_quickly
from server.models.lifecycle import Report
from server.models.model import LoadedModel
from server.process.load import compute_stage, load

logger = logging.getLogger("oneloop.ray")

PATIENCE_S = 10.0  # for a share of the cluster, before it is said that somebody waits


class AnyJoin(Protocol):
    """Message `runtime.parallel.messages.Join`, which this module only passes on."""

    @property
    def stage(self) -> int: ...


class StageActor:
    """Ray actor that computes one pipeline stage."""

    def __init__(self, log_level: str, log_format: str) -> None:
        logs.begin(log_level, log_format)
        limit_arenas()
        switch_quickly()

    def compute(self, join: Any) -> None:
        """Compute the stage until the process of the first stage has ended. `join`: an `AnyJoin`."""
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(compute_stage(join))

    def gpu_ids(self) -> list[int | str]:
        """Return the ids of this stage's GPUs."""
        ids: list[int | str] = ray.get_gpu_ids()
        return ids


class StageActors:
    """Launcher of pipeline stages as Ray actors, a `runtime.parallel.processes.Launcher`."""

    def __init__(self, config: ServerConfig, group: PlacementGroup) -> None:
        """Prepare the actors. `group`: placement group with a bundle for each stage."""
        self.host: str = ray.util.get_node_ip_address()
        self._config, self._group = config, group
        self._actors: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    def begin(self, joins: Sequence[AnyJoin], ended: Callable[[int, str], None]) -> None:
        for join in joins:
            self._tasks.append(asyncio.create_task(self._compute(join, ended), name="stage"))

    async def _compute(self, join: AnyJoin, ended: Callable[[int, str], None]) -> None:
        try:
            actor = actor_in(self._group, join.stage, self._config)
            self._actors.append(actor)
            await actor.compute.remote(join)
            why = "it has ended"
        except RayError as error:
            why = str(error).strip().splitlines()[0]
        if not self._is_closing:
            ended(join.stage, why)

    async def close(self) -> None:
        self._is_closing = True
        for actor in self._actors:
            ray.kill(actor)
        await asyncio.gather(*self._tasks, return_exceptions=True)


def actor_in(group: PlacementGroup, number: int, config: ServerConfig) -> Any:
    """Create a stage actor in bundle `number`, with all of the bundle's resources."""
    share = group.bundle_specs[number]
    return (
        ray.remote(StageActor)
        .options(
            num_cpus=share.get("CPU", 0),
            num_gpus=share.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        )
        .remote(config.log_level, config.log_format)
    )


def shares(config: ServerConfig, num_cpus: int, num_gpus: int) -> list[dict[str, float]]:
    """Return the resources of each stage's bundle, by Ray's resource names."""
    share = {"CPU": float(num_cpus), "GPU": float(num_gpus)}
    return [{kind: number for kind, number in share.items() if number}] * config.pipeline_parallel_size


def strategy(config: ServerConfig, num_gpus: int) -> str:
    """Return the placement strategy: each stage on its own host if there are enough hosts, else any host with free resources."""
    hosts = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= num_gpus]
    return "STRICT_SPREAD" if len(hosts) >= config.pipeline_parallel_size else "SPREAD"


class StageCluster:
    """Resources of a Ray cluster, at `RAY_ADDRESS` or on this machine, for a model whose first stage runs in this process."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._group: PlacementGroup | None = None

    def __enter__(self) -> Self:
        """Connect to the cluster and wait for the resources. Call it on the main thread, before an event loop runs. Raises
        ConfigError without a cluster."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        where: dict[str, Any] = {} if "RAY_ADDRESS" in os.environ else {"address": "local", "include_dashboard": False}
        try:
            ray.init(log_to_driver=True, **where)
        except ConnectionError as error:
            raise ConfigError(f"no Ray cluster at {os.environ['RAY_ADDRESS']}: {error}") from None
        config, num_gpus = self._config, 0
        if config.device != "cpu" and ray.cluster_resources().get("GPU"):
            num_gpus = config.tensor_parallel_size
        wanted = shares(config, 1, num_gpus)
        wanted[0] = {**wanted[0], f"node:{ray.util.get_node_ip_address()}": 0.001}  # the first stage is on this host
        self._group = placement_group(wanted, strategy=strategy(config, num_gpus))
        while not self._group.wait(PATIENCE_S):
            logger.warning(
                "waiting for a Ray cluster with resources for %d stages of %d GPUs each, the first stage on this host",
                len(wanted), num_gpus,
            )  # fmt: skip
        if num_gpus:
            place = actor_in(self._group, 0, config)
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get(place.gpu_ids.remote())))
            ray.kill(place)
        return self

    def __exit__(self, *exception: object) -> None:
        ray.shutdown()

    async def load(self, config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
        """Load the model with all its stages. A `Load` function."""
        assert self._group is not None, "it was entered"
        return await load(config, report, cancel, stages=partial(StageActors, config, self._group))


async def load_in_replica(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    """Load the model in a replica of Ray Serve. The replica's placement group has a bundle for each stage. A `Load` function."""
    if config.distributed_executor_backend == "uni":
        return await load(config, report, cancel)
    group = ray.util.get_current_placement_group()
    assert group is not None, "it was deployed with one"
    return await load(config, report, cancel, stages=partial(StageActors, config, group))
