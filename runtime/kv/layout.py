"""KV layout: what one block holds in every layer, what that costs in bytes, and which layers share a block table.

Layers that see equally far, and are of one shape, are a group: they keep and free blocks together. A block holds 16 tokens of
as many layers as all groups agree on, so that any group can use any block of one pool; a group of more layers takes several
blocks for the same tokens. Numbers only, no tensors."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import lcm

BLOCK_SIZE = 16  # tokens in a block
_MOST_WASTE = 1 / 8  # of a group's places in blocks, for the sake of fewer block tables


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one layer for one token: [num_kv_heads, head_size] each. `latent`: the values are part of the keys,
    and nothing else is stored. `window`: a query sees itself and the `window - 1` tokens before it, None for all."""

    num_kv_heads: int
    head_size: int
    latent: bool = False
    window: int | None = None

    @property
    def key_elements(self) -> int:
        return self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that see `window` tokens, None for all. `width`: the blocks they take for the tokens of one."""

    window: int | None = None
    width: int = 1

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
        entries = -(-num_tokens // block_size)
        if self.window is not None:
            seen_or_new = self.window - 1 + max_step_tokens
            entries = min(entries, (seen_or_new + block_size - 2) // block_size + 1)  # wherever they begin in a block
        return entries * self.width


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's keys lie: in the blocks of which of a step's block `table`s, in which of a block's `column`s, and in which
    `part` of the `parts` equal parts of that."""

    table: int
    column: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`layers` and their `places`, one entry each. A group has `width` of a step's tables, one behind another. A column holds
    `column_elements` numbers a token, and as many values unless all layers are `latent`."""

    layers: tuple[LayerShape, ...]
    places: tuple[LayerPlace, ...]
    groups: tuple[LayerGroup, ...]
    num_columns: int
    column_elements: int
    element_bytes: int
    block_size: int = BLOCK_SIZE

    @classmethod
    def of(cls, layers: tuple[LayerShape, ...], element_bytes: int, block_size: int = BLOCK_SIZE) -> KVLayout:
        """`element_bytes`: the size of a cache element."""
        if len({layer.latent for layer in layers}) > 1:
            raise ValueError("layers with values of their own and layers without cannot share blocks")
        column_elements = lcm(*(layer.key_elements for layer in layers))
        members: dict[LayerShape, list[int]] = {}
        for index, layer in enumerate(layers):
            members.setdefault(layer, []).append(index)
        kinds = sorted(members, key=lambda kind: kind.window is not None)  # those that see everything first
        sizes = [-(-len(members[kind]) * kind.key_elements // column_elements) for kind in kinds]
        num_columns = _columns(sizes)
        places: dict[int, LayerPlace] = {}
        groups: list[LayerGroup] = []
        for kind in kinds:
            first_table = sum(group.width for group in groups)
            parts = column_elements // kind.key_elements
            for number, index in enumerate(members[kind]):
                column, part = divmod(number, parts)
                table, column = divmod(column, num_columns)
                places[index] = LayerPlace(first_table + table, column, part, parts)
            groups.append(LayerGroup(kind.window, table + 1))
        in_order = tuple(places[index] for index in range(len(layers)))
        return cls(layers, in_order, tuple(groups), num_columns, column_elements, element_bytes, block_size)

    @property
    def num_tables(self) -> int:
        return sum(group.width for group in self.groups)

    @property
    def block_bytes(self) -> int:
        return (
            self.num_columns * self.column_elements * (1 if self.latent else 2) * self.element_bytes * self.block_size
        )

    @property
    def latent(self) -> bool:
        return all(layer.latent for layer in self.layers)

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
        """For people: who shares blocks, and how much of them stays empty."""
        shares, first = [], 0
        for group in self.groups:
            num = sum(first <= place.table < first + group.width for place in self.places)
            reach = "everything" if group.window is None else f"{group.window:,} tokens"
            shares.append(f"{num} layers see {reach} and take {group.width} for {self.block_size} tokens")
            first += group.width
        held = sum(layer.key_elements for layer in self.layers)
        waste = 1 - held / (self.num_tables * self.num_columns * self.column_elements)
        return f"KV blocks hold {self.num_columns} layers: {'; '.join(shares)}; {waste:.0%} of their room stays empty"


def _columns(sizes: list[int]) -> int:
    """How many to a block, for groups of so many: those that make the fewest tables, and among them waste least."""

    def tables(num: int) -> list[int]:
        return [-(-size // num) for size in sizes]

    def is_thrifty(num: int) -> bool:
        return all(size >= (1 - _MOST_WASTE) * num * each for size, each in zip(sizes, tables(num), strict=True))

    thrifty = filter(is_thrifty, range(1, max(sizes) + 1))
    return min(thrifty, key=lambda num: (sum(tables(num)), num * sum(tables(num))))
