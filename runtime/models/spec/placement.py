"""Reader of files that place experts on devices.

The JSON is a list with the expert numbers of each device, for all layers. Or it is an object with such lists by layer number, as
in {"3": [[0, 2], [1, 3]]}. Layers that are not in the object have consecutive experts on each device. Every device must have the
same number of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.models.spec.sharding import Placement


def read_placement(path: Path, num_layers: int, size: int) -> Placement:
    """Read the placement of experts for a model with `num_layers` layers on `size` devices. Raises OSError, and ValueError for
    invalid content."""
    given = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(given, list):
        order = _order(given, size, "it")
        return Placement(dict.fromkeys(range(num_layers), order))
    if not isinstance(given, dict):
        raise ValueError("expected a list for each device, or an object of such lists by layer")
    orders = {}
    for layer, lists in given.items():
        if not (layer.isdecimal() and int(layer) < num_layers):
            raise ValueError(f"there is no layer {layer}: they go from 0 to {num_layers - 1}")
        orders[int(layer)] = _order(lists, size, f"layer {layer}")
    return Placement(orders)


def _order(lists: Any, size: int, what: str) -> tuple[int, ...]:
    are_lists = isinstance(lists, list) and all(isinstance(each, list) for each in lists)
    if not are_lists or not all(type(number) is int for each in lists for number in each):
        raise ValueError(f"{what} is not a list of lists of integers")
    if len(lists) != size:
        raise ValueError(f"{what} has lists for {len(lists)} devices instead of {size}")
    if len({len(each) for each in lists}) != 1:
        raise ValueError(f"{what} must give every device the same number of experts")
    numbers = [number for each in lists for number in each]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"{what} names an expert twice")
    return tuple(numbers)
