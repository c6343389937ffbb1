"""Ray Serve application: an ingress and its replicas. Needs Ray."""

from __future__ import annotations

import dataclasses
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.config.server_config import ServerConfig
from server.http import logs
from server.http.offload import limit_arenas, switch_quickly
from server.ray.fleet import ServeFleet
from server.ray.ingress import ingress_app
from server.ray.options import RayOptions, num_devices
from server.ray.replica import Replica
from server.ray.router import PrefixRouter
from server.ray.stages import load_in_replica, shares, strategy

HEALTH_PERIOD_S = 2.0  # a replica that died is replaced after as long, at most
HEALTH_LIMIT_S = 30.0
WAIT_LOOP_S = 0.1  # between two looks at whether a replica that is to end has finished
OF_PROXY = (b"date", b"x-request-id")
MAX_ONGOING_AT_INGRESS = 20_000
SPARE_SHARE = 0.25  # of the requests that a replica should have: as much busier may a prompt's home be


class ServedReplica(Replica):
    async def __init__(self, config: ServerConfig) -> None:  # type: ignore[misc]  # which Serve awaits
        logs.begin(config.log_level, config.log_format)
        limit_arenas()
        switch_quickly()
        Replica.__init__(self, config, load_in_replica, serve.get_replica_context().replica_id.unique_id)
        await self.start()

    async def __del__(self) -> None:  # which Serve calls, once, before the process ends
        await self.stop()


class ServedIngress:
    def __init__(self, config: ServerConfig, replicas: DeploymentHandle) -> None:
        logs.begin(config.log_level, config.log_format)
        fleet = ServeFleet(replicas, ray.util.get_node_ip_address())
        self._app = without_repeats(ingress_app(config, fleet))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


def build(options: RayOptions, config: ServerConfig) -> Application:
    """Build the application for `serve.run`. GPUs that `options` do not set are read from the cluster."""
    gpus = num_gpus(options, config)
    own = dataclasses.replace(config, cors_origin=(), access_log=False)  # the ingress sees to both
    if not gpus and own.num_threads is None:
        own = dataclasses.replace(own, num_threads=options.cpus_per_replica)
    # Only warnings of Serve's own log; the ingress logs each request.
    quiet = {"enable_access_log": False, "log_level": "DEBUG" if config.log_level == "debug" else "WARNING"}
    shared: dict[str, Any] = {
        "graceful_shutdown_timeout_s": config.drain_timeout,
        "graceful_shutdown_wait_loop_s": WAIT_LOOP_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_LIMIT_S,
        "logging_config": quiet,
    }
    replicas = serve.deployment(ServedReplica).options(
        name="Replica",
        ray_actor_options={"num_cpus": options.cpus_per_replica, "num_gpus": gpus},
        **_placement(own, options.cpus_per_replica, gpus),
        max_ongoing_requests=options.max_ongoing(own),
        max_queued_requests=config.max_queue,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"spare": options.target_ongoing_requests * SPARE_SHARE},
        ),
        **_number(options),
        **shared,
    )
    ingress = serve.deployment(serve.ingress()(ServedIngress)).options(
        name="Ingress",
        num_replicas=options.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_ONGOING_AT_INGRESS,
        **shared,
    )
    return ingress.bind(config, replicas.bind(own))


def without_repeats(app: ASGIApp) -> ASGIApp:
    """Return `app` without the response headers that Serve's proxy adds itself: date and request id."""

    async def surrounded(scope: Scope, receive: Receive, send: Send) -> None:
        async def once(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [each for each in message["headers"] if each[0] not in OF_PROXY]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, once)

    return surrounded


def _number(options: RayOptions) -> dict[str, Any]:
    if not options.scales:
        return {"num_replicas": options.replicas}
    low, high = options.replica_range
    return {
        "autoscaling_config": {
            "min_replicas": low,
            "max_replicas": high,
            "initial_replicas": options.replicas,
            "target_ongoing_requests": options.target_ongoing_requests,
        }
    }


def _placement(config: ServerConfig, num_cpus: int, num_gpus: int) -> dict[str, Any]:
    if config.distributed_executor_backend == "uni":
        return {}
    return {
        "placement_group_bundles": shares(config, num_cpus, num_gpus),
        "placement_group_strategy": strategy(config, num_gpus),
    }


def num_gpus(options: RayOptions, config: ServerConfig) -> int:
    """Return the number of GPUs of each replica, or of each stage if pipeline stages are separate processes. A replica is one
    process, so all its GPUs are on one machine."""
    if options.gpus_per_replica is not None:
        return options.gpus_per_replica
    if config.device == "cpu":
        return 0
    if not ray.is_initialized():  # as `serve run` has it, which takes the cluster that it finds
        ray.init(namespace="serve")
    if not ray.cluster_resources().get("GPU"):
        return 0
    return num_devices(config)
