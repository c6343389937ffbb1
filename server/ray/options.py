"""RayOptions: options of `oneloop ray`, in addition to the server's options, which every replica receives.

Independent of Ray; imports the standard library only, so that option errors are reported before heavy imports."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from server.config.command_line import CommandParser, add_options
from server.config.option import options_by_name
from server.config.parse import config_of
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError, flag_of

MAX_REPLICAS = 4096
NUM_SEQS = 256  # in one step, where --max-num-seqs leaves it to the model
USAGE = """usage: oneloop ray [--replicas N] [--min-replicas N --max-replicas N] [options]

Serve a model by several processes, on one machine or many: a Ray Serve application (needs oneloop[ray]).

  --replicas N                  replicas, each a process with the whole model (default 1); with a range, the first number
  --min-replicas N              minimum number of replicas, at low load
  --max-replicas N              maximum number of replicas, at high load
  --target-ongoing-requests N   target number of requests in flight per replica, for a range (default 32)
  --gpus-per-replica N          GPUs of each replica, on one machine (default: as many as the model needs; none on a machine
                                without GPUs)
  --cpus-per-replica N          CPU cores of each replica; without GPUs, also its threads (default 1)
  --ingress-replicas N          processes that accept requests from Serve's proxies and choose a replica (default 1)
  --ray-address ADDRESS         address of a cluster (default: RAY_ADDRESS, or a temporary cluster on this machine)
  options                       as in oneloop --help; --host and --port are those of Serve's proxies
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    replicas: int = 1
    min_replicas: int | None = None
    max_replicas: int | None = None
    target_ongoing_requests: float = 32.0
    gpus_per_replica: int | None = None
    cpus_per_replica: int = 1
    ingress_replicas: int = 1
    ray_address: str | None = None

    def __post_init__(self) -> None:
        for name in ("replicas", "cpus_per_replica", "ingress_replicas", "max_replicas"):
            self._check(name, 1, MAX_REPLICAS)
        for name in ("min_replicas", "gpus_per_replica"):
            self._check(name, 0, MAX_REPLICAS)
        self._check("target_ongoing_requests", 1, 1_000_000)
        low, high = self.replica_range
        if not low <= self.replicas <= high:
            raise ConfigError(f"--replicas {self.replicas} is not from --min-replicas {low} to --max-replicas {high}")

    def _check(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{flag_of(name)}: {value:g} is out of range: it must be from {least} to {most}")

    @property
    def scales(self) -> bool:
        """True if the number of replicas depends on the load."""
        return self.min_replicas is not None or self.max_replicas is not None

    @property
    def replica_range(self) -> tuple[int, int]:
        """Minimum and maximum number of replicas."""
        low = min(1, self.replicas) if self.min_replicas is None else self.min_replicas
        high = max(low, self.replicas) if self.max_replicas is None else self.max_replicas
        return (low, high) if self.scales else (self.replicas, self.replicas)

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Self, ServerConfig]:
        """Return Ray's options and the options of each replica from `argv`. Raises ConfigError."""
        parser = CommandParser(
            prog="oneloop ray", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
        for field in dataclasses.fields(cls):
            kind = float if field.name == "target_ongoing_requests" else str if field.name == "ray_address" else int
            parser.add_argument(flag_of(field.name), type=kind, dest=field.name, default=field.default)
        add_options(parser, options_by_name())
        given = parser.read(argv)
        own = {field.name: given.pop(field.name) for field in dataclasses.fields(cls)}
        return cls(**own), replica_config(config_of(given, environ))

    @classmethod
    def of_names(cls, values: Mapping[str, Any]) -> tuple[Self, ServerConfig]:
        """Return Ray's options and the options of each replica from `name=value` pairs (`serve run`). Raises ConfigError."""
        argv: list[str] = []
        for name, value in values.items():
            flag = flag_of(name)
            for each in value if isinstance(value, list | tuple) else [value]:
                match str(each).lower():
                    case "true":
                        argv.append(flag)
                    case "false":
                        argv.append(f"--no-{flag[2:]}")
                    case _:
                        argv.append(f"{flag}={each}")
        return cls.parse(argv, os.environ)

    def max_ongoing(self, config: ServerConfig) -> int:
        """Return the number of requests that a replica accepts at a time: those that run and those that wait in its engine."""
        return (config.max_num_seqs or NUM_SEQS) + config.max_queue


def num_devices(config: ServerConfig) -> int:
    """Return the number of GPUs that one process of the model uses."""
    num_stages = config.pipeline_parallel_size if config.distributed_executor_backend == "uni" else 1
    return config.tensor_parallel_size * num_stages * config.data_parallel_size


def replica_config(config: ServerConfig) -> ServerConfig:
    """Return `config` for a replica. Responses are not stored: later requests may reach other replicas. Raises ConfigError."""
    for flag, value, instead in (
        ("--batch-dir", config.batch_dir, "batches need a single process"),
        ("--uds", config.uds, "Serve's proxies need a port"),
    ):
        if value is not None:
            raise ConfigError(f"{flag} is not supported by oneloop ray: {instead}")
    return dataclasses.replace(config, max_stored_responses=0)
