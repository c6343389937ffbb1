"""Table of routes: every Route and ErrorsBelow that a file of `server/api` declares."""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from server.api.route import ErrorsBelow, Route
from server.http.errors import ErrorShape

T = TypeVar("T")


def _declared(kind: type[T]) -> list[T]:
    """Return every object of type `kind` that a file of `server/api` declares, without duplicates."""
    found = pkgutil.walk_packages([str(Path(__file__).parent)], f"{__package__}.")
    modules = [import_module(each.name) for each in found if each.name != __name__]
    declared = [each for module in modules for each in vars(module).values() if isinstance(each, kind)]
    return list({id(each): each for each in declared}.values())


def found_routes() -> tuple[Route, ...]:
    """Return every Route. A path with parameters comes after the paths without, because it could match them.

    Raises ValueError if two routes have the same method and path."""
    routes = _declared(Route)
    if twice := [key for key, count in Counter((each.method, each.path) for each in routes).items() if count > 1]:
        raise ValueError(f"more than one endpoint answers {' '.join(twice[0])}")
    return tuple(sorted(routes, key=lambda each: "{" in each.path))


ROUTES = found_routes()
SOCKET_PATHS = frozenset(each.path.encode("ascii") for each in ROUTES if each.is_socket)
ERROR_SHAPES: Mapping[str, ErrorShape] = MappingProxyType({each.path: each.shape for each in _declared(ErrorsBelow)})
