"""Captured graphs of encoder passes for frequent shapes. One replay replaces hundreds of kernel launches.

A pass is captured when its shape occurs for the second time, on the encoder's stream and thread, so no step waits for it. A few
graphs are kept. They share memory, because only one runs at a time."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from runtime.models.model import Compute
from runtime.platform.capture import recording

log = logging.getLogger("oneloop.engine")


class Graph(Protocol):
    def replay(self) -> None: ...


class _Captured(NamedTuple):
    """Captured encoder pass. `compute` is stored because it references tensors whose addresses the graph uses."""

    graph: Graph
    inputs: Mapping[str, Tensor]
    outputs: Tensor
    compute: Compute


class EncoderGraphs:
    """Runner of encoder passes with captured graphs. `max_graphs`: maximum number of graphs (LRU eviction). `max_outputs`:
    passes with more outputs are not captured, since launches are a small part of their time."""

    def __init__(self, max_graphs: int = 8, max_outputs: int = 2048) -> None:
        self._max_graphs, self._max_outputs = max_graphs, max_outputs
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._captured: OrderedDict[bytes, _Captured] = OrderedDict()
        self._memory: Any = None
        self.num_replays = 0

    def run(self, key: bytes, num_outputs: int, inputs: Mapping[str, Tensor], compute: Compute) -> Tensor:
        if num_outputs > self._max_outputs:
            return compute(inputs)
        found = self._captured.get(key)
        if found is None:
            if not self._is_known(key):
                return compute(inputs)
            found = self._capture(key, inputs, compute)
            if found is None:
                return compute(inputs)
        self._captured.move_to_end(key)
        for name, each in inputs.items():
            found.inputs[name].copy_(each)
        found.graph.replay()
        self.num_replays += 1
        return found.outputs.clone()  # the next replay of any graph overwrites the memory

    def _is_known(self, key: bytes) -> bool:
        known = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > 8 * self._max_graphs:
            self._seen.popitem(last=False)
        return known

    def _capture(self, key: bytes, inputs: Mapping[str, Tensor], compute: Compute) -> _Captured | None:
        static = {name: each.clone() for name, each in inputs.items()}
        try:
            graph, outputs = self._record(key, static, compute)
        except RuntimeError as error:
            log.warning("CUDA graphs of the encoder are disabled: %s", str(error).splitlines()[0])
            self._max_outputs = 0
            return None
        if len(self._captured) >= self._max_graphs:
            self._captured.popitem(last=False)
        found = self._captured[key] = _Captured(graph, static, outputs, compute)
        return found

    def _record(self, key: bytes, inputs: Mapping[str, Tensor], compute: Compute) -> tuple[Graph, Tensor]:
        """Capture the work that `compute` enqueues. Return the graph and its output tensor."""
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self._memory):
            outputs = compute(inputs)
        return graph, outputs
