"""KV layout: what one block holds, what that costs in bytes, and which layers share a block table.

A block is a row of columns of equal size. A column holds, of one layer, the keys of `block_size` tokens or their values, or
the state that a recurrent layer has of a whole sequence. Layers that see equally far, and are of one shape, are a group: they
keep and free blocks together. Any group can use any block of the one pool; a group of more layers than a block has columns
takes several blocks for the same tokens. Where states are larger than the keys of 16 tokens, blocks are of more tokens, and
kernels, which know only small blocks, count those in them. Numbers only, no tensors."""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import lcm, prod

BLOCK_SIZE = 16  # tokens in a block as kernels count them
_ALL = sys.maxsize  # tokens that an entry is about which holds a state
_ALIGNMENT = 16  # bytes: of a state's tensors
_MOST_WASTE = 1 / 8  # of a group's columns, for the sake of fewer block tables


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one layer for one token: [num_kv_heads, head_size] each. `latent`: the values are part of the keys,
    and nothing else is stored. `window`: a query sees itself and the `window - 1` tokens before it, None for all."""

    num_kv_heads: int
    head_size: int
    latent: bool = False
    window: int | None = None

    @property
    def num_columns(self) -> int:
        return 1 if self.latent else 2


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a recurrent layer remembers of a sequence, whatever its length: float32 tensors of these shapes."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_columns(self) -> int:
        return 1

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins, in bytes, and where all end."""
        sizes = (-(-4 * prod(shape) // _ALIGNMENT) * _ALIGNMENT for shape in self.shapes)
        return tuple(accumulate(sizes, initial=0))

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]


MemoryShape = LayerShape | StateShape


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that see `window` tokens, None for all. `width`: the blocks they take for the tokens of one, or, where what they
    keep is a `state`, for a sequence."""

    window: int | None = None
    width: int = 1
    state: bool = False

    def entry_tokens(self, block_size: int) -> int:
        """Tokens that one entry of a block table is about."""
        return _ALL if self.state else block_size

    def first_seen(self, position: int) -> int:
        """The first token that queries at `position` and behind it see."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def reserved_to(self, start: int, num_tokens: int, max_step_tokens: int) -> int:
        """How far a sequence of `num_tokens` that is computed from `start` on has blocks before its first step: from there on a
        window frees as many as it takes."""
        if self.window is None:
            return num_tokens
        return min(num_tokens, self.first_seen(start) + self.window - 1 + max_step_tokens)

    def most_blocks(self, num_tokens: int, max_step_tokens: int, block_size: int) -> int:
        """That a sequence of `num_tokens` has at a time."""
        entries = -(-num_tokens // self.entry_tokens(block_size))
        if self.window is not None:
            seen_or_new = self.window - 1 + max_step_tokens
            entries = min(entries, (seen_or_new + block_size - 2) // block_size + 1)  # wherever they begin in a block
        return entries * self.width


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's memory lies: in the blocks of which of a step's block `table`s, in which of a block's `columns` (that of
    keys and that of values, or the only one), and in which `part` of the `parts` equal parts of these."""

    table: int
    columns: tuple[int, ...]
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`layers` and their `places`, one entry each; a layer of a model has as many entries as it remembers things, be it none. A
    group has `width` of a step's tables, one behind another; groups of states are the last.

    A block is `num_columns` of `column_bytes`. `scale_bytes`: behind each head's numbers of a token. `block_size` tokens are a
    whole number of blocks of `kernel_block_size`."""

    layers: tuple[MemoryShape, ...]
    places: tuple[LayerPlace, ...]
    groups: tuple[LayerGroup, ...]
    num_columns: int
    column_bytes: int
    scale_bytes: int
    block_size: int
    kernel_block_size: int

    @classmethod
    def of(
        cls,
        layers: tuple[MemoryShape, ...],
        element_bytes: int,
        kernel_block_size: int = BLOCK_SIZE,
        scale_bytes: int = 0,
    ) -> KVLayout:
        """`element_bytes`: the size of a cache element; `scale_bytes`: of what each head of a token has besides."""
        members: dict[MemoryShape, list[int]] = {}
        for index, layer in enumerate(layers):
            members.setdefault(layer, []).append(index)
        kinds = sorted(members, key=_order)

        def token_bytes(kind: LayerShape) -> int:
            return kind.num_kv_heads * (kind.head_size * element_bytes + scale_bytes)

        widest = lcm(*(token_bytes(kind) for kind in kinds if isinstance(kind, LayerShape)))
        state_bytes = max((kind.num_bytes for kind in kinds if isinstance(kind, StateShape)), default=0)
        small_bytes = kernel_block_size * widest
        if all(isinstance(kind, StateShape) for kind in kinds):  # then no token takes any
            small_bytes = max(_ALIGNMENT, state_bytes)
        size = max(1, -(-state_bytes // small_bytes))
        column_bytes = size * small_bytes

        def parts(kind: MemoryShape) -> int:
            return widest // token_bytes(kind) if isinstance(kind, LayerShape) else column_bytes // kind.num_bytes

        num_columns = _columns([(-(-len(members[kind]) // parts(kind)), kind.num_columns) for kind in kinds])
        places: dict[int, LayerPlace] = {}
        groups: list[LayerGroup] = []
        for kind in kinds:
            first_table, taken = sum(group.width for group in groups), kind.num_columns
            for number, index in enumerate(members[kind]):
                turn, part = divmod(number, parts(kind))
                table, turn = divmod(turn, num_columns // taken)
                columns = tuple(range(turn * taken, (turn + 1) * taken))
                places[index] = LayerPlace(first_table + table, columns, part, parts(kind))
            window = kind.window if isinstance(kind, LayerShape) else None
            groups.append(LayerGroup(window, table + 1, isinstance(kind, StateShape)))
        return cls(
            layers, tuple(places[index] for index in range(len(layers))), tuple(groups), num_columns, column_bytes,
            scale_bytes, size * kernel_block_size, kernel_block_size,
        )  # fmt: skip

    @property
    def num_tables(self) -> int:
        return sum(group.width for group in self.groups)

    @property
    def num_state_tables(self) -> int:
        return sum(group.width for group in self.groups if group.state)

    @property
    def block_bytes(self) -> int:
        return self.num_columns * self.column_bytes

    @property
    def parts(self) -> tuple[int, ...]:
        """Of a column, in each table: kernels count blocks of one layer, which are that many to a block of the pool."""
        by_table = {place.table: place.parts for place in self.places}
        return tuple(by_table[table] for table in range(self.num_tables))

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """That a sequence of `num_tokens` has at a time, computed in steps of up to `max_step_tokens`."""
        return sum(group.most_blocks(num_tokens, max_step_tokens, self.block_size) for group in self.groups)

    def longest(self, num_blocks: int, max_step_tokens: int, limit: int) -> int:
        """The most tokens, up to `limit`, of a sequence that `num_blocks` hold."""
        return bisect_right(
            range(1, limit + 1), num_blocks, key=lambda tokens: self.most_blocks(tokens, max_step_tokens)
        )

    def describe(self) -> str:
        """For people: who shares blocks."""
        shares, first = [], 0
        for group in self.groups:
            num = sum(first <= place.table < first + group.width for place in self.places)
            reach = "all tokens" if group.window is None else f"{group.window:,} tokens"
            if group.state:
                shares.append(f"{num} layers keep a state: {group.width} for a sequence")
            else:
                shares.append(f"{num} layers see {reach}: {group.width} for {self.block_size} tokens")
            first += group.width
        return f"KV blocks of {self.block_bytes:,} bytes are shared by groups of layers; {'; '.join(shares)}"


def _order(kind: MemoryShape) -> int:
    """Those that see everything, then windows, then states."""
    return 2 if isinstance(kind, StateShape) else int(kind.window is not None)


def _columns(kinds: list[tuple[int, int]]) -> int:
    """How many to a block, for kinds of layers that take so many times so many columns, the latter in one block: those that make
    the fewest tables among those that waste little, and of them those that waste least."""

    def num_tables(num: int) -> list[int]:
        return [-(-times // (num // columns)) for times, columns in kinds]

    def waste(num: int) -> float:
        """Of the kind that has most of it."""
        each = zip(kinds, num_tables(num), strict=True)
        return max(1 - times * columns / (num * tables) for (times, columns), tables in each)

    def cost(num: int) -> tuple[float, int, int]:
        tables = sum(num_tables(num))
        return max(_MOST_WASTE, waste(num)), tables, num * tables

    least = max(columns for _, columns in kinds)
    return min(range(least, max(times * columns for times, columns in kinds) + 1), key=cost)
