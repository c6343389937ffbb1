"""Servers of a comparison, read from a TOML file. This module only reads data: it starts and requests nothing.

Each server has a `[[server]]` table. A server with a `command` is started and stopped by the comparison. Any other server must
run at `base_url`. `${NAME}` and `${NAME:-default}` are replaced from the environment, for the selected servers only."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from loadtests.address import Address
from loadtests.load import RequestOptions

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class BadServersFile(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class Server:
    """Server of a comparison. `share`: fraction of each workload's requests that is sent. `workloads`: names of its workloads;
    empty means all. `model`: None uses the first one in /v1/models."""

    name: str
    base_url: str = ""
    port: int | None = None
    command: list[str] = field(default_factory=list)
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    health: str = "/health"
    start_limit_s: float = 300.0
    model: str | None = None
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0
    workloads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.port is None) == (not self.base_url):
            raise BadServersFile(f"server {self.name!r}: give either port or base_url")
        if not 0 < self.share <= 1:
            raise BadServersFile(f"server {self.name!r}: share must be above 0 and at most 1")

    @property
    def address(self) -> Address:
        return Address.parse(self.base_url or f"http://127.0.0.1:{self.port}")

    def request_options(self, model: str) -> RequestOptions:
        return RequestOptions(model, self.ignore_eos, self.extra_body)

    def takes(self, workload: str) -> bool:
        return not self.workloads or workload in self.workloads


def read_servers(path: Path, only: Collection[str] = (), environment: Mapping[str, str] | None = None) -> list[Server]:
    """Return the servers in a file, in its order. `only`: names to select; empty means all. Raises BadServersFile,
    AddressRefused."""
    try:
        tables = tomllib.loads(path.read_text())["server"]
    except OSError as error:
        raise BadServersFile(f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadServersFile(f"{path}: {error}") from None
    except KeyError:
        raise BadServersFile(f"{path}: no [[server]] in it") from None
    if not isinstance(tables, list) or not all(isinstance(table.get("name"), str) for table in tables):
        raise BadServersFile(f"{path}: every [[server]] needs a name")
    names = [table["name"] for table in tables]
    if len(set(names)) < len(names):
        raise BadServersFile(f"{path}: two servers of the same name")
    if unknown := set(only) - set(names):
        raise BadServersFile(f"{path}: no server {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    environment = os.environ if environment is None else environment
    servers = [_read_server(table, environment) for table in tables if not only or table["name"] in only]
    for server in servers:
        _ = server.address  # refused here, before anything starts
    return servers


def _read_server(table: dict[str, Any], environment: Mapping[str, str]) -> Server:
    name = table["name"]
    types = get_type_hints(Server)
    if unknown := table.keys() - {entry.name for entry in dataclasses.fields(Server)}:
        raise BadServersFile(f"server {name!r}: unknown key {', '.join(sorted(unknown))}")
    values = _expand(table, environment, name)
    if isinstance(values.get("command"), str):
        values["command"] = shlex.split(values["command"])
    for key, value in values.items():
        kind = getattr(types[key], "__origin__", types[key])
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise BadServersFile(f"server {name!r}: {key} = {value!r} has the wrong type")
    return Server(**values)


def _expand(value: Any, environment: Mapping[str, str], name: str) -> Any:
    if isinstance(value, dict):
        return {key: _expand(member, environment, name) for key, member in value.items()}
    if isinstance(value, list):
        return [_expand(member, environment, name) for member in value]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        found = environment.get(match[1], match[2])
        if found is None:
            raise BadServersFile(f"server {name!r}: environment variable {match[1]} is not set")
        return found

    return _VARIABLE.sub(variable, value)
