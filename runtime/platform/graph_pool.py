"""Graph pool: captured steps by shape, so that launching a step costs one replay.

Steps that only decode are captured for a series of batch sizes. Mixed steps are captured for a series of token counts, each with a
few numbers of rows. Steps with draft tokens are captured for a series of token counts with as many rows, and logits for each
token. A step is padded to the smallest shape that fits; if none fits, it runs without a graph. Graphs share one memory pool,
because only one runs at a time; the largest is captured first. A drafter's work after a step is a separate graph, so a step
without it costs the same as without speculation. Independent of the model.

A server captures about one in seven of the graphs (`first`) before serving, and the rest while it serves. Until then a step
uses a graph of up to twice its size, or runs without a graph."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from runtime.platform.capture import capture_stream, recording
from runtime.runner.device_inputs import StepShape
from runtime.runner.runner import Sampled

_TRIED = 32  # draft tokens
_STEPS_WITHOUT = 16  # a shape that so many steps lacked is captured while steps run


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the captured batch sizes: 1, 2, 4, 8, then multiples of 8 to 64, of 16 to 256, of 32 beyond, and the maximum."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in ladder if size < max_num_seqs), max_num_seqs]


def mixed_shapes(max_num_seqs: int, max_num_tokens: int) -> list[StepShape]:
    """Return shapes of mixed steps. Token counts are at most 1/8 apart for long steps, where padding costs time, and 1/2 apart
    for short steps. There are shapes for few, many and all rows."""
    finer = {16: 8, 32: 16, 64: 32, 128: 64, 1024: 128, 2048: 256, 4096: 512}  # step between sizes, from each size on
    sizes, size, step = [], 16, 8
    while size < max_num_tokens:
        sizes.append(size)
        step = finer.get(size, step)
        size += step
    shapes = []
    for size in [*sizes, max_num_tokens]:
        counts = (4, 32, 128, 256, max_num_seqs) if size <= 512 else (32, max_num_seqs)
        shapes += [StepShape(size, num, False) for num in sorted({min(num, size, max_num_seqs) for num in counts})]
    return shapes


def drafted_shapes(max_num_seqs: int, max_num_tokens: int) -> list[StepShape]:
    """Return shapes with draft tokens. Token counts are 25 to 50 % apart, up to `max_num_seqs` or 64. One more shape has
    `_TRIED` further tokens, so that draft tokens can be tried while every row decodes."""
    sizes, most = [2], min(max_num_tokens, max(max_num_seqs, 64))
    while sizes[-1] < most:
        size = sizes[-1]
        sizes.append(min(most, size + max(2, 1 << (size.bit_length() - 2))))
    if most < max_num_tokens:
        sizes.append(min(max_num_tokens, most + _TRIED))
    return [
        StepShape(size, min(size, max_num_seqs), uniform=False, drafts=True) for size in sizes if size <= max_num_tokens
    ]


class _Memory:
    """Device memory at an address, for torch.as_tensor. Its dtype is an integer: the CUDA array interface lacks bfloat16."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that uses the memory of `tensor` without owning it. The graph's memory pool owns it."""
    if not tensor.numel():
        return torch.empty_like(tensor)
    assert tensor.is_contiguous()
    alias = torch.as_tensor(_Memory(tensor), device=tensor.device)
    assert alias.data_ptr() == tensor.data_ptr(), "a copy would never change"
    return alias.view(tensor.dtype)


def _aliases(hidden: Any) -> Any:
    """Return aliases (see `_alias`) of hidden states: of a tensor, of tuples of tensors, or of transformers' named tensors."""
    if isinstance(hidden, torch.Tensor):
        return _alias(hidden)
    if isinstance(hidden, Mapping):
        return type(hidden)(**{name: _aliases(value) for name, value in hidden.items()})
    if isinstance(hidden, tuple):
        aliases = map(_aliases, hidden)
        return type(hidden)(*aliases) if hasattr(hidden, "_fields") else tuple(aliases)
    return hidden


class Captured(NamedTuple):
    """Outputs of a captured step: its samples, and the hidden states of all its tokens."""

    sampled: Sampled
    hidden: Any


Follow = Callable[[], None]  # enqueues the drafter's work after a step, and holds its tensors
Compute = Callable[[StepShape], tuple[Captured, Follow | None]]


class GraphPool:
    def __init__(
        self, max_num_seqs: int, max_num_tokens: int, *, drafts: bool = False, adapters: bool = False, pools: bool = False
    ) -> None:  # fmt: skip
        """Choose the shapes to capture. `drafts`: include steps with draft tokens. `adapters`: each shape with and without
        adapters, so that steps without adapters cost nothing extra. `pools`: no decodes and no sampling."""
        self.pools = pools
        self._decodes = [] if pools else decode_sizes(max_num_seqs)
        self._mixed = mixed_shapes(max_num_seqs, max_num_tokens)
        self._drafted = drafted_shapes(max_num_seqs, max_num_tokens) if drafts else []
        self._with_adapters = (False, True) if adapters else (False,)
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Captured]] = {}
        self._following: dict[StepShape, torch.cuda.CUDAGraph] = {}  # drafter's work after each shape
        self._uncaptured: dict[StepShape, int] = {}  # in order; steps that lacked each
        self._due: list[StepShape] = []  # shapes that too many steps lacked
        self.memory: Any = None  # torch's handle of the graphs' memory pool

    @property
    def shapes(self) -> list[StepShape]:
        """All shapes to capture, the largest first."""
        decodes = [StepShape(size, size, True) for size in self._decodes]
        return sorted(
            (
                replace(shape, adapters=adapters)
                for shape in (*self._mixed, *self._drafted, *decodes)
                for adapters in self._with_adapters
            ),
            key=lambda shape: (-shape.num_tokens, -shape.num_rows, shape.uniform),
        )

    @property
    def first(self) -> list[StepShape]:
        """Shapes to capture at start-up: powers of two tokens with the maximum number of rows, all shapes with draft tokens,
        and the largest shape, whose memory the other graphs share."""
        max_rows = {shape.num_tokens: shape.num_rows for shape in self._mixed}  # the last shape of a size has most rows

        def is_first(shape: StepShape) -> bool:
            size = shape.num_tokens
            largest = size == (self._decodes[-1] if shape.uniform else self._mixed[-1].num_tokens)
            return (largest or size.bit_count() == 1) and (shape.uniform or shape.num_rows == max_rows[size])

        return [shape for shape in self.shapes if shape.drafts or is_first(shape)]

    def capture(self, shapes: Iterable[StepShape], compute: Compute) -> None:
        """Capture the work that `compute` enqueues for each of `shapes`, and the drafter's work after it.

        One shape of each kind must have run before, so that compilation and allocation are done. `capture_next` captures the
        remaining shapes of `self.shapes` later."""
        self.memory = torch.cuda.graph_pool_handle()
        for shape in shapes:
            self._capture(shape, compute)
        left = [shape for shape in reversed(self.shapes) if shape not in self._graphs]
        self._uncaptured = dict.fromkeys(sorted(left, key=lambda shape: not shape.uniform), 0)  # decodes, then prompts

    def next_due(self, *, idle: bool) -> StepShape | None:
        """Remove and return the next shape to capture, or None. Unless `idle`, only return shapes that many steps have needed."""
        if self._due:
            shape = self._due.pop()
        elif idle and self._uncaptured:
            shape = next(iter(self._uncaptured))
        else:
            return None
        del self._uncaptured[shape]
        return shape

    def capture_late(self, shape: StepShape, compute: Compute) -> None:
        """Capture a shape from `next_due`. No step may be enqueued at the same time. If this fails, no further graphs are
        captured and the error is raised."""
        try:
            self._capture(shape, compute)
        except Exception:
            self._graphs.pop(shape, None)
            self._following.pop(shape, None)
            self._uncaptured.clear()
            self._due.clear()
            raise

    def _capture(self, shape: StepShape, compute: Compute) -> None:
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self.memory, capture_stream()):
            (sampled, hidden), follow = compute(shape)
        if follow is not None:  # while the step's tensors that it reads exist
            following = self._following[shape] = torch.cuda.CUDAGraph()
            with recording(following, self.memory, capture_stream()):
                follow()
            del follow
        # Logits and hidden states are large and are read before the next replay, so the next graph shares their memory.
        self._graphs[shape] = graph, Captured(sampled._replace(logits=_alias(sampled.logits)), _aliases(hidden))

    def clear(self) -> None:
        """Drop all graphs and stop capturing. Every step then runs without a graph."""
        self._graphs.clear()
        self._following.clear()
        self._uncaptured.clear()
        self._due.clear()
        self.memory = None

    @property
    def longest_drafted(self) -> int | None:
        """Number of tokens of the longest captured step with draft tokens, or None if there is none."""
        return max((shape.num_tokens for shape in self._graphs if shape.drafts), default=None)

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @property
    def has_more(self) -> bool:
        """True if shapes are left to capture."""
        return bool(self._uncaptured)

    def find(self, wanted: StepShape) -> StepShape | None:
        """Return the smallest captured shape that fits `wanted`. None if it is over twice as long as the best uncaptured one."""
        fitting = self._fitting(wanted)
        best = next(fitting, None)
        if best is None or best in self._graphs:
            return best
        self._go_without(best)
        within = (shape for shape in fitting if shape.num_tokens <= 2 * best.num_tokens)
        return next((shape for shape in within if shape in self._graphs), None)

    def _fitting(self, wanted: StepShape) -> Iterator[StepShape]:
        if wanted.uniform:
            for size in self._decodes[bisect_left(self._decodes, wanted.num_rows) :]:
                yield StepShape(size, size, True, adapters=wanted.adapters)
            return
        for shape in self._drafted if wanted.drafts else self._mixed:
            if shape.num_tokens >= wanted.num_tokens and shape.num_rows >= wanted.num_rows:
                yield replace(shape, adapters=True) if wanted.adapters else shape

    def _go_without(self, shape: StepShape) -> None:
        if shape in self._uncaptured:
            self._uncaptured[shape] += 1
            if self._uncaptured[shape] == _STEPS_WITHOUT:
                self._due.append(shape)

    def replay(self, shape: StepShape) -> Captured:
        """Enqueue the captured step of `shape` on the current stream. The next replay overwrites its outputs."""
        graph, captured = self._graphs[shape]
        graph.replay()
        return captured

    def replay_following(self, shape: StepShape) -> None:
        """Replay the drafter's graph of `shape`, if it has one. Call this right after `replay` of the same shape."""
        following = self._following.get(shape)
        if following is not None:
            following.replay()


class CapturedProposals:
    """Captured graphs of one kind of draft round. `sizes`: ascending numbers of rows. Rounds with fewer rows are padded."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, one: Callable[[int], None], memory: Any) -> None:
        """Capture the work that `one` enqueues, for each number of rows. `memory`: memory pool of graphs that never run at once.

        `one` must have run before, so that nothing is left to compile."""
        for size in reversed(self._sizes):
            graph = self._graphs[size] = torch.cuda.CUDAGraph()
            with recording(graph, memory, capture_stream()):
                one(size)

    def replay(self, num_rows: int) -> bool:
        index = bisect_left(self._sizes, num_rows)
        if index == len(self._sizes) or not self._graphs:
            return False
        self._graphs[self._sizes[index]].replay()
        return True
