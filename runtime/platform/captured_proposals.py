"""Captured proposals: a kind of a drafter's rounds of guesses as graphs, by number of rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runtime.platform.capture_stream import capture_stream


class CapturedProposals:
    """ProposalGraphs. `sizes`: numbers of rows that are captured, ascending; fewer rows are padded."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, one: Callable[[int], None], memory: Any) -> None:
        """Record what `one` enqueues for so many rows, in the `memory` of graphs none of which runs beside another. It has run
        before, so nothing is left to compile."""
        stream = capture_stream()
        for size in reversed(self._sizes):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                one(size)
            self._graphs[size] = graph

    def replay(self, num_rows: int) -> bool:
        index = bisect_left(self._sizes, num_rows)
        graph = self._graphs.get(self._sizes[index]) if index < len(self._sizes) else None
        if graph is None:
            return False
        graph.replay()
        return True
