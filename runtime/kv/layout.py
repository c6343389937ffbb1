"""KV layout: content of a block, its size in bytes, and the layers that share a block table.

A block is one page in each of several KV tensors; all pages have one size. For one layer, a page contains the keys of
`block_size` tokens, or their values, or the recurrent state of a sequence. Layers of one memory kind form a group, which
allocates and frees blocks together. All groups share one pool. A group with more layers than there are KV tensors takes several
blocks for the same tokens. If states are larger than the keys of 16 tokens, blocks contain more tokens. Kernels support only
small blocks and address parts of such a block. The layout contains numbers only, no tensors."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import lcm

from runtime.kv.kinds import ALIGNMENT, Chunk, Cross, MemoryKind, Nothing, State, Window

BLOCK_SIZE = 16  # tokens in a block as kernels count them
_MAX_WASTE = 1 / 8  # of a group's pages, for the sake of fewer block tables


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one memory `kind`, which share block tables. `width`: number of blocks for each entry of their table."""

    kind: MemoryKind
    width: int = 1

    @property
    def window(self) -> int | None:
        return self.kind.window if isinstance(self.kind, Window) else None

    @property
    def chunk(self) -> int | None:
        """Size of an attention chunk in tokens; None if the layers have no chunks. A query reads tokens of its own chunk only."""
        return self.kind.window if isinstance(self.kind, Chunk) else None

    @property
    def state(self) -> bool:
        return isinstance(self.kind, State)

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the number of blocks for all tokens of a sequence of `num_tokens` tokens."""
        return self.kind.num_entries(num_tokens, block_size) * self.width

    def first_in_window(self, position: int) -> int:
        """Return the first token that queries at or after `position` read."""
        return self.kind.first_in_window(position)

    def reserved_to(self, start: int, num_tokens: int, max_step_tokens: int) -> int:
        """Return the number of tokens for which blocks are reserved before a sequence of `num_tokens` starts. Its first step
        begins at token `start`."""
        return self.kind.reserved_to(start, num_tokens, max_step_tokens)

    def max_blocks(self, num_tokens: int, max_step_tokens: int, block_size: int) -> int:
        """Return the maximum number of blocks that a sequence of `num_tokens` tokens has at the same time. A step computes at
        most `max_step_tokens` of them."""
        return self.kind.max_entries(num_tokens, max_step_tokens, block_size) * self.width


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Location of a layer's KV cache or state. `table`: index of the layer's block table in a step. `kv_tensors`: indices of the
    KV tensors, keys and values or one. `sub_slot`: index of the layer among the `num_sub_slots` equal parts of a page."""

    table: int
    kv_tensors: tuple[int, ...]
    sub_slot: int = 0
    num_sub_slots: int = 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of all layers' memory in one pool. `kinds` and `placements` have one entry for each layer with memory of its own. A
    group has `width` consecutive tables of a step; groups of recurrent states come last.

    A block is `num_kv_tensors` pages of `page_bytes` bytes each. `block_size` is a multiple of `kernel_block_size`, both in
    tokens."""

    kinds: tuple[MemoryKind, ...]
    placements: tuple[LayerPlacement, ...]
    groups: tuple[LayerGroup, ...]
    num_kv_tensors: int
    page_bytes: int
    block_size: int
    kernel_block_size: int

    @classmethod
    def of(cls, kinds: tuple[MemoryKind, ...], kernel_block_size: int = BLOCK_SIZE) -> KVLayout:
        """Return the layout for layers of these `kinds`. Raises ValueError if the dtype of a kind is not decided yet."""
        members: dict[MemoryKind, list[int]] = {}
        for index, kind in enumerate(kinds):
            members.setdefault(kind, []).append(index)
        distinct = sorted(members, key=lambda kind: (kind.order, repr(kind)))  # whichever layer comes first
        page_bytes, block_size = _page(distinct, kernel_block_size)

        def num_sub_slots(kind: MemoryKind) -> int:
            match kind:
                case Nothing():
                    return 1
                case State(state):
                    return page_bytes // state.num_bytes
                case _:
                    return page_bytes // (block_size * kind.kv.token_bytes)

        num_kv_tensors = _num_kv_tensors(
            [
                (-(-len(members[kind]) // num_sub_slots(kind)), kind.num_kv_tensors)
                for kind in distinct
                if kind.num_kv_tensors
            ]
        )
        placements: dict[int, LayerPlacement] = {}
        groups: list[LayerGroup] = []
        for kind in distinct:
            first_table, taken, table = sum(group.width for group in groups), kind.num_kv_tensors, 0
            for number, index in enumerate(members[kind]):
                nth, sub_slot = divmod(number, num_sub_slots(kind))
                table, nth = divmod(nth, num_kv_tensors // taken) if taken else (0, 0)
                kv_tensors = tuple(range(nth * taken, (nth + 1) * taken))
                placements[index] = LayerPlacement(first_table + table, kv_tensors, sub_slot, num_sub_slots(kind))
            groups.append(LayerGroup(kind, table + 1))
        return cls(
            kinds, tuple(placements[index] for index in range(len(kinds))), tuple(groups), num_kv_tensors, page_bytes,
            block_size, kernel_block_size,
        )  # fmt: skip

    @property
    def num_tables(self) -> int:
        return sum(group.width for group in self.groups)

    def chunks(self, max_model_len: int) -> tuple[int | None, ...]:
        """Return the chunk size of each block table. It is None without chunks, or if a context of `max_model_len` has only one
        chunk."""
        by_table = (group.chunk for group in self.groups for _ in range(group.width))
        return tuple(None if chunk is None or chunk >= max_model_len else chunk for chunk in by_table)

    @property
    def num_outputs(self) -> tuple[int | None, ...]:
        """Number of encoder outputs per sequence for each block table; None for tables of tokens."""
        kinds = (group.kind for group in self.groups for _ in range(group.width))
        return tuple(kind.num_outputs if isinstance(kind, Cross) else None for kind in kinds)

    def max_entries(self, max_model_len: int) -> int:
        """Return the maximum number of entries of a table for one sequence, in blocks of the kernels' size."""
        per_block = self.block_size // self.kernel_block_size
        longest = max(max_model_len, *(num or 0 for num in self.num_outputs)) if self.groups else max_model_len
        return -(-longest // self.block_size) * per_block

    @property
    def num_state_tables(self) -> int:
        return sum(group.width for group in self.groups if group.state)

    @property
    def no_prefix_reason(self) -> str | None:
        """Reason why no prefix can be a hit; None if prefixes can be hits."""
        return next((reason for group in self.groups if (reason := group.kind.no_prefix_reason)), None)

    @property
    def in_one_step(self) -> bool:
        """True if a prompt must be computed in one step, because some layer reads only the tokens of its step."""
        return any(kind.in_one_step for kind in self.kinds)

    @property
    def block_bytes(self) -> int:
        return self.num_kv_tensors * self.page_bytes

    @property
    def num_sub_slots(self) -> tuple[int, ...]:
        """Number of equal parts of a page, by block table. Kernels address blocks of one layer, of which a page has that many."""
        by_table = {placement.table: placement.num_sub_slots for placement in self.placements}
        return tuple(by_table[table] for table in range(self.num_tables))

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Return the maximum number of blocks that a sequence of `num_tokens` tokens has at the same time. A step computes at
        most `max_step_tokens` of them."""
        return sum(group.max_blocks(num_tokens, max_step_tokens, self.block_size) for group in self.groups)

    def longest(self, num_blocks: int, max_step_tokens: int, limit: int) -> int:
        """Return the maximum length in tokens, at most `limit`, of a sequence that fits in `num_blocks` blocks."""
        return bisect_right(
            range(1, limit + 1), num_blocks, key=lambda tokens: self.max_blocks(tokens, max_step_tokens)
        )

    def describe(self) -> str:
        """Return one line for the log about the groups of layers that share blocks."""
        shares, first = [], 0
        for group in self.groups:
            num = sum(first <= placement.table < first + group.width for placement in self.placements)
            per = f"{self.block_size} tokens" if group.kind.grows else "a sequence"
            shares.append(f"{num} layers {group.kind}: {group.num_blocks(1, self.block_size)} for {per}")
            first += group.width
        return f"KV blocks of {self.block_bytes:,} bytes are shared by groups of layers; {'; '.join(shares)}"


def _page(kinds: list[MemoryKind], kernel_block_size: int) -> tuple[int, int]:
    """Return (bytes of a page, tokens of a block). The keys of each kind fill a page, and the largest state fits in it."""
    tokens = [kind.kv.token_bytes for kind in kinds if not isinstance(kind, State | Nothing)]
    state_bytes = max((kind.state.num_bytes for kind in kinds if isinstance(kind, State)), default=0)
    if not tokens:  # then no token takes any
        return max(ALIGNMENT, state_bytes) if state_bytes else 0, kernel_block_size
    small_bytes = kernel_block_size * lcm(*tokens)
    size = max(1, -(-state_bytes // small_bytes))
    return size * small_bytes, size * kernel_block_size


def _num_kv_tensors(kinds: list[tuple[int, int]]) -> int:
    """Return the number of KV tensors. `kinds`: (number of layers, pages in a block) of each kind. Among the numbers that waste
    at most `_MAX_WASTE`, the result needs the fewest tables, and then wastes the fewest pages."""

    def num_tables(num: int) -> list[int]:
        return [-(-times // (num // pages)) for times, pages in kinds]

    def waste(num: int) -> float:
        each = zip(kinds, num_tables(num), strict=True)
        return max(1 - times * pages / (num * tables) for (times, pages), tables in each)

    def cost(num: int) -> tuple[float, int, int]:
        tables = sum(num_tables(num))
        return max(_MAX_WASTE, waste(num)), tables, num * tables

    if not kinds:
        return 0
    smallest = max(pages for _, pages in kinds)
    return min(range(smallest, max(times * pages for times, pages in kinds) + 1), key=cost)
