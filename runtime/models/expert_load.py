"""ExpertLoad: metrics of how many tokens are routed to each expert of each layer.

Routers count on the device in every step (`Weights.counts`). This class reads the counts occasionally, in parallel with steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.api import Metric

_NUMBER = re.compile(r"\.(\d+)\.")


class ExpertLoad:
    def __init__(self, counts: Sequence[Mapping[str, Tensor]], num_devices: int = 1) -> None:
        """Create the metrics. `counts`: for each pipeline stage, token counts [E] int64 in router order, by the names of experts.
        `num_devices`: number of devices that share a layer's experts, each a contiguous range."""
        self._tables = [each for of_stage in counts for each in of_stage.items()]
        self._num_devices = num_devices
        self._before: dict[str, Tensor] = {}  # counts from before the model slept
        for _, table in self._tables:
            table.zero_()  # discards counts of warm-up

    def awake(self, other: ExpertLoad) -> None:
        """Add the counts of a rebuilt model, whose metrics are `other`, from now on. Called after the model slept."""
        self._before, self._tables = dict(self._read()), other._tables

    def by_layer(self) -> dict[str, list[int]]:
        """Return the number of tokens of each expert, by layer number."""
        return {_layer(name): table.tolist() for name, table in self._read()}

    def metrics(self) -> list[Metric]:
        layers = self.by_layer()
        devices = [0] * self._num_devices
        for counts in layers.values():
            share = len(counts) // self._num_devices
            for device in range(self._num_devices):
                devices[device] += sum(counts[device * share : (device + 1) * share])
        return [
            Metric(
                "expert_tokens", "Tokens that experts took, by the device that has them, over all layers.", "counter",
                {(("device", str(number)),): float(num) for number, num in enumerate(devices)},
            ),
            Metric(
                "expert_load_max_over_mean",
                "Tokens of a layer's busiest expert since the start, over the mean of all its experts; 1 is even.",
                "gauge",
                {(("layer", layer),): _max_over_mean(counts) for layer, counts in layers.items()},
            ),
            Metric(
                "expert_load_unused", "Experts of a layer that no token has taken since the start.", "gauge",
                {(("layer", layer),): float(counts.count(0)) for layer, counts in layers.items()},
            ),
        ]  # fmt: skip

    def _read(self) -> list[tuple[str, Tensor]]:
        return [
            (name, table + before if (before := self._before.get(name)) is not None else table)
            for name, table in ((name, _on_host(table)) for name, table in self._tables)
        ]


def _layer(name: str) -> str:
    """Return the layer number in a name such as model.layers.3.mlp.experts; without a number, the name itself."""
    found = _NUMBER.search(name)
    return name if found is None else found[1]


def _max_over_mean(counts: list[int]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def _on_host(table: Tensor) -> Tensor:
    """Return the current values on the host without waiting for steps in flight."""
    if table.device.type == "cpu":
        return table.clone()
    stream: Any = torch.cuda.Stream
    with torch.cuda.device(table.device), torch.cuda.stream(stream(table.device)):
        return table.cpu()
