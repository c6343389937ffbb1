"""Memory kinds: the per-sequence data that a layer keeps between steps, its dtype, and the rules that follow.

The kind of a layer determines how its blocks behave: the number of entries for a token count and those outside the window
(block tables), which cached entries are a hit (prefix cache), and the bytes of a block (layout). For every kind, a block is
copied as a whole, so a copy of a state is a snapshot and a copy of keys and values is a prefix. A block that is moved or shared
must never be written again; full entries satisfy this if `no_prefix_reason` is None, and snapshots of entries that are replaced.

Layers of equal kinds share block tables. Numbers only: no tensor, no block, no sequence."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import ClassVar, Self

ALIGNMENT = 16  # bytes: of a state's tensors
_ALL = sys.maxsize  # tokens that one entry is about which is about all of them


@dataclass(frozen=True, slots=True)
class KVDtype:
    """A dtype of the KV cache: `name` is torch's; behind those of each head of a token lie `scale_bytes`."""

    name: str
    element_bytes: int
    scale_bytes: int = 0


FLOAT32 = KVDtype("float32", 4)


@dataclass(frozen=True, slots=True)
class AttentionKVSpec:
    """Keys and values of one layer for one token: [num_kv_heads, head_size] each. `latent`: the values are part of the keys,
    and nothing else is stored. `dtype` None: whichever the plan has for all layers that leave it open."""

    num_kv_heads: int
    head_size: int
    latent: bool = False
    dtype: KVDtype | None = None

    @property
    def num_kv_tensors(self) -> int:
        return 1 if self.latent else 2

    @property
    def known_dtype(self) -> KVDtype:
        """Raises ValueError where that is still open."""
        if self.dtype is None:
            raise ValueError("the KV cache of a layer has no dtype yet: see MemoryKind.with_dtype")
        return self.dtype

    @property
    def elements(self) -> int:
        """Elements of one head of one token, its scales among them."""
        return self.head_size + self.known_dtype.scale_bytes // self.known_dtype.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in a page."""
        return self.num_kv_heads * (self.head_size * self.known_dtype.element_bytes + self.known_dtype.scale_bytes)


@dataclass(frozen=True, slots=True)
class RecurrentStateSpec:
    """Shapes of the float32 tensors that a recurrent layer keeps for a sequence, whatever its length."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """The byte at which each tensor begins, and the one at which all end."""
        sizes = (-(-FLOAT32.element_bytes * prod(shape) // ALIGNMENT) * ALIGNMENT for shape in self.shapes)
        return tuple(accumulate(sizes, initial=0))

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]


class _Kind:
    """Defaults of memory kinds. An entry of a block table covers `entry_tokens` tokens."""

    __slots__ = ()
    order: ClassVar[int] = 0  # of a kind's tables among those of a step
    grows: ClassVar[bool] = False  # a sequence takes more blocks as it gets longer
    is_replaced: ClassVar[bool] = False  # each step replaces its entry, so that a hit is copied and not shared
    no_prefix_reason: ClassVar[str | None] = None  # why no cached block is ever a hit
    in_one_step: ClassVar[bool] = False  # a sequence must be computed whole

    @property
    def num_kv_tensors(self) -> int:
        """KV tensors in which one layer has a page of a block."""
        return 1

    def with_dtype(self, dtype: KVDtype) -> Self:
        """The same, kept as `dtype` if that was left open."""
        return self

    def entry_tokens(self, block_size: int) -> int:
        return _ALL

    def num_entries(self, num_tokens: int, block_size: int) -> int:
        """Entries that `num_tokens` tokens, from the sequence's first on, take."""
        return -(-num_tokens // self.entry_tokens(block_size))

    def num_tokens(self, num_entries: int, block_size: int) -> int:
        """The most tokens whose entries are among the first `num_entries`."""
        return min(num_entries * self.entry_tokens(block_size), _ALL)

    def max_entries(self, num_tokens: int, max_step_tokens: int, block_size: int) -> int:
        """The most entries that a sequence of `num_tokens`, computed in steps of up to `max_step_tokens`, has at a time."""
        return self.num_entries(num_tokens, block_size)

    def first_in_window(self, position: int) -> int:
        """The first token that queries at `position` and behind it see: entries before its own are given back."""
        return 0

    def reserved_to(self, start: int, num_tokens: int, max_step_tokens: int) -> int:
        """Return up to which token a sequence of `num_tokens` has entries before its first step, which computes from `start`
        on."""
        return num_tokens

    def longest_prefix(
        self, names: Sequence[object], num_entries: int, cached: Container[object], block_size: int
    ) -> int:
        """Return an upper bound of the usable prefix, at most `num_entries`: after it, all entries that queries read are in
        `cached`.

        The bound may be too large if earlier entries are missing that later ones need. The caller then tries again with
        fewer entries."""
        return 0


class _Attention(_Kind):
    __slots__ = ()
    kv: AttentionKVSpec

    @property
    def num_kv_tensors(self) -> int:
        return self.kv.num_kv_tensors


class _Tokens(_Attention):
    """Entries are about the tokens of a block each, and final once these are computed."""

    __slots__ = ()
    grows = True

    def entry_tokens(self, block_size: int) -> int:
        return block_size


@dataclass(frozen=True, slots=True)
class Full(_Tokens):
    """Keys and values of all tokens. A prefix is a hit where all its blocks are cached."""

    kv: AttentionKVSpec

    def with_dtype(self, dtype: KVDtype) -> Self:
        return self if self.kv.dtype is not None else replace(self, kv=replace(self.kv, dtype=dtype))

    def longest_prefix(
        self, names: Sequence[object], num_entries: int, cached: Container[object], block_size: int
    ) -> int:
        """Return the longest cached prefix, by bisection: blocks behind a missing one are rarely cached, since they are used
        and evicted together."""
        return bisect_left(names, True, hi=num_entries, key=lambda name: name not in cached)

    def __str__(self) -> str:
        return "see all tokens"


@dataclass(frozen=True, slots=True)
class Window(_Tokens):
    """Keys and values of the last tokens: a query sees itself and the `window` - 1 before it. Blocks out of the window are
    given back while the sequence runs, and a prefix is a hit where the blocks of its last window are cached."""

    order = 1
    kv: AttentionKVSpec
    window: int

    def with_dtype(self, dtype: KVDtype) -> Self:
        return self if self.kv.dtype is not None else replace(self, kv=replace(self.kv, dtype=dtype))

    def max_entries(self, num_tokens: int, max_step_tokens: int, block_size: int) -> int:
        seen_or_new = self.window - 1 + max_step_tokens
        anywhere = (seen_or_new + block_size - 2) // block_size + 1  # wherever they begin in a block
        return min(self.num_entries(num_tokens, block_size), anywhere)

    def first_in_window(self, position: int) -> int:
        return max(0, position + 1 - self.window)

    def reserved_to(self, start: int, num_tokens: int, max_step_tokens: int) -> int:
        """Return up to which token the sequence has entries at first. Beyond that, the window frees as many blocks as it
        takes."""
        return min(num_tokens, self.first_in_window(start) + self.window - 1 + max_step_tokens)

    def longest_prefix(
        self, names: Sequence[object], num_entries: int, cached: Container[object], block_size: int
    ) -> int:
        def first(num: int) -> int:
            return self.first_in_window(num * block_size) // block_size

        index, first_index = num_entries - 1, first(num_entries)
        while index >= first_index:
            if names[index] not in cached:
                num_entries, first_index = index, first(index)
            index -= 1
        return num_entries

    def __str__(self) -> str:
        return f"see {self.window:,} tokens"


@dataclass(frozen=True, slots=True)
class Chunk(Window):
    """Window that restarts every `window` tokens: a query attends to the tokens of its chunk up to itself."""

    def first_in_window(self, position: int) -> int:
        return position // self.window * self.window

    def __str__(self) -> str:
        return f"see chunks of {self.window:,} tokens"


_SEES_WHOLE_PROMPTS = "what a layer keeps of a prompt's token depends on those behind it"


@dataclass(frozen=True, slots=True)
class PromptFull(Full):
    """Full attention in which all tokens of a prompt attend to each other."""

    no_prefix_reason = _SEES_WHOLE_PROMPTS
    in_one_step = True


@dataclass(frozen=True, slots=True)
class PromptWindow(Window):
    """Window in which all tokens of a prompt attend to each other at any distance; generated tokens see the window."""

    no_prefix_reason = _SEES_WHOLE_PROMPTS
    in_one_step = True


@dataclass(frozen=True, slots=True)
class Cross(_Attention):
    """Keys and values of an encoder's outputs: `num_outputs` for each sequence, whatever its length, written in the first
    step after it takes a row and read by all its tokens. They belong to no token, so they are never shared, and a prefix may
    be a hit without them."""

    order = 2
    kv: AttentionKVSpec
    num_outputs: int

    def with_dtype(self, dtype: KVDtype) -> Self:
        return self if self.kv.dtype is not None else replace(self, kv=replace(self.kv, dtype=dtype))

    def num_entries(self, num_tokens: int, block_size: int) -> int:
        return -(-self.num_outputs // block_size) if num_tokens else 0

    def num_tokens(self, num_entries: int, block_size: int) -> int:
        return _ALL if num_entries * block_size >= self.num_outputs else 0

    def first_in_window(self, position: int) -> int:
        """Return `position`: of the sequence's own tokens none before it is seen."""
        return position

    def longest_prefix(
        self, names: Sequence[object], num_entries: int, cached: Container[object], block_size: int
    ) -> int:
        return num_entries

    def __str__(self) -> str:
        return f"see {self.num_outputs:,} outputs of an encoder"


@dataclass(frozen=True, slots=True)
class Nothing(_Kind):
    """No memory: a query attends only to tokens of its own step. The block table stays empty and exists for the step's
    metadata."""

    order = 3
    no_prefix_reason = "layers without memory see nothing that was computed before"
    in_one_step = True

    @property
    def num_kv_tensors(self) -> int:
        return 0

    def num_entries(self, num_tokens: int, block_size: int) -> int:
        return 0

    def num_tokens(self, num_entries: int, block_size: int) -> int:
        return _ALL

    def __str__(self) -> str:
        return "keep nothing"


@dataclass(frozen=True, slots=True)
class State(_Kind):
    """One entry for the whole sequence, replaced in place by each step. It is not cleared: a row that begins at position 0
    ignores it. A snapshot is a copy, cached under the name of the last block that it has read: a prefix is a hit where there
    is one of its end."""

    order = 4
    is_replaced = True
    state: RecurrentStateSpec

    def first_in_window(self, position: int) -> int:
        """Return the last token before `position`: all that is before is in the state behind it."""
        return max(0, position - 1)

    def longest_prefix(
        self, names: Sequence[object], num_entries: int, cached: Container[object], block_size: int
    ) -> int:
        while num_entries and names[num_entries - 1] not in cached:
            num_entries -= 1
        return num_entries

    def __str__(self) -> str:
        return "keep a state"


MemoryKind = Full | Window | Cross | Nothing | State
