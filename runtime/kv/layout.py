"""KV layout: what one block holds, what that costs in bytes, and which layers share a block table.

A block is a row of columns of equal size. A column holds, of one layer, the keys of `block_size` tokens or their values, or
the state that a recurrent layer has of a whole sequence. Layers whose memory is of one kind are a group: they keep and free
blocks together. Any group can use any block of the one pool; a group of more layers than a block has columns takes several
blocks for the same tokens. Where states are larger than the keys of 16 tokens, blocks are of more tokens, and kernels, which
know only small blocks, count those in them. Numbers only, no tensors."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import lcm

from runtime.kv.kinds import ALIGNMENT, MemoryKind, Nothing, State, Window

BLOCK_SIZE = 16  # tokens in a block as kernels count them
_MAX_WASTE = 1 / 8  # of a group's columns, for the sake of fewer block tables


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose memory is of one `kind`. `width`: the blocks they take for an entry of it."""

    kind: MemoryKind
    width: int = 1

    @property
    def window(self) -> int | None:
        return self.kind.window if isinstance(self.kind, Window) else None

    @property
    def state(self) -> bool:
        return isinstance(self.kind, State)

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """For all tokens of a sequence of `num_tokens`."""
        return self.kind.num_entries(num_tokens, block_size) * self.width

    def first_seen(self, position: int) -> int:
        """The first token that queries at `position` and behind it see."""
        return self.kind.first_seen(position)

    def reserved_to(self, start: int, num_tokens: int, max_step_tokens: int) -> int:
        """How far a sequence of `num_tokens` that is computed from `start` on has blocks before its first step."""
        return self.kind.reserved_to(start, num_tokens, max_step_tokens)

    def max_blocks(self, num_tokens: int, max_step_tokens: int, block_size: int) -> int:
        """That a sequence of `num_tokens` has at a time."""
        return self.kind.max_entries(num_tokens, max_step_tokens, block_size) * self.width


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
    """`kinds` and their `places`, one entry each; a layer of a model has as many entries as it keeps things, be it none. A group
    has `width` of a step's tables, one behind another; groups of states are the last.

    A block is `num_columns` of `column_bytes`. `block_size` tokens are a whole number of blocks of `kernel_block_size`."""

    kinds: tuple[MemoryKind, ...]
    places: tuple[LayerPlace, ...]
    groups: tuple[LayerGroup, ...]
    num_columns: int
    column_bytes: int
    block_size: int
    kernel_block_size: int

    @classmethod
    def of(cls, kinds: tuple[MemoryKind, ...], kernel_block_size: int = BLOCK_SIZE) -> KVLayout:
        """Raises ValueError where a kind's dtype is still open."""
        members: dict[MemoryKind, list[int]] = {}
        for index, kind in enumerate(kinds):
            members.setdefault(kind, []).append(index)
        distinct = sorted(members, key=lambda kind: kind.order)
        column_bytes, block_size = _column(distinct, kernel_block_size)

        def parts(kind: MemoryKind) -> int:
            """Layers of that kind which share a column."""
            match kind:
                case Nothing():
                    return 1
                case State(state):
                    return column_bytes // state.num_bytes
                case _:
                    return column_bytes // (block_size * kind.kv.token_bytes)

        num_columns = _columns(
            [(-(-len(members[kind]) // parts(kind)), kind.num_columns) for kind in distinct if kind.num_columns]
        )
        places: dict[int, LayerPlace] = {}
        groups: list[LayerGroup] = []
        for kind in distinct:
            first_table, taken, table = sum(group.width for group in groups), kind.num_columns, 0
            for number, index in enumerate(members[kind]):
                turn, part = divmod(number, parts(kind))
                table, turn = divmod(turn, num_columns // taken) if taken else (0, 0)
                columns = tuple(range(turn * taken, (turn + 1) * taken))
                places[index] = LayerPlace(first_table + table, columns, part, parts(kind))
            groups.append(LayerGroup(kind, table + 1))
        return cls(
            kinds, tuple(places[index] for index in range(len(kinds))), tuple(groups), num_columns, column_bytes,
            block_size, kernel_block_size,
        )  # fmt: skip

    @property
    def num_tables(self) -> int:
        return sum(group.width for group in self.groups)

    @property
    def num_state_tables(self) -> int:
        return sum(group.width for group in self.groups if group.state)

    @property
    def no_prefix_reason(self) -> str | None:
        """Why no prefix is ever a hit, None where it may be."""
        return next((reason for group in self.groups if (reason := group.kind.no_prefix_reason)), None)

    @property
    def block_bytes(self) -> int:
        return self.num_columns * self.column_bytes

    @property
    def parts(self) -> tuple[int, ...]:
        """Of a column, in each table: kernels count blocks of one layer, which are that many to a block of the pool."""
        by_table = {place.table: place.parts for place in self.places}
        return tuple(by_table[table] for table in range(self.num_tables))

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """That a sequence of `num_tokens` has at a time, computed in steps of up to `max_step_tokens`."""
        return sum(group.max_blocks(num_tokens, max_step_tokens, self.block_size) for group in self.groups)

    def longest(self, num_blocks: int, max_step_tokens: int, limit: int) -> int:
        """The most tokens, up to `limit`, of a sequence that `num_blocks` hold."""
        return bisect_right(
            range(1, limit + 1), num_blocks, key=lambda tokens: self.max_blocks(tokens, max_step_tokens)
        )

    def describe(self) -> str:
        """For people: who shares blocks."""
        shares, first = [], 0
        for group in self.groups:
            num = sum(first <= place.table < first + group.width for place in self.places)
            per = f"{self.block_size} tokens" if group.kind.grows else "a sequence"
            shares.append(f"{num} layers {group.kind}: {group.num_blocks(1, self.block_size)} for {per}")
            first += group.width
        return f"KV blocks of {self.block_bytes:,} bytes are shared by groups of layers; {'; '.join(shares)}"


def _column(kinds: list[MemoryKind], kernel_block_size: int) -> tuple[int, int]:
    """Bytes of a column, and tokens of a block: keys of each kind fill one, and the largest state fits in it."""
    tokens = [kind.kv.token_bytes for kind in kinds if not isinstance(kind, State | Nothing)]
    state_bytes = max((kind.state.num_bytes for kind in kinds if isinstance(kind, State)), default=0)
    if not tokens:  # then no token takes any
        return max(ALIGNMENT, state_bytes) if state_bytes else 0, kernel_block_size
    small_bytes = kernel_block_size * lcm(*tokens)
    size = max(1, -(-state_bytes // small_bytes))
    return size * small_bytes, size * kernel_block_size


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
        return max(_MAX_WASTE, waste(num)), tables, num * tables

    if not kinds:
        return 0
    least = max(columns for _, columns in kinds)
    return min(range(least, max(times * columns for times, columns in kinds) + 1), key=cost)
