"""Memory kinds: the data that a layer keeps for a sequence between steps, its dtype, and the rules of its blocks.

The kind of a layer determines the number of block table entries for a token count, and which entries are outside the window. It
also determines which cached entries are a prefix hit, and the size of a block. For every kind, a block is copied as a whole. A copy
of a recurrent state is a snapshot; a copy of keys and values is a prefix. A block that is shared or moved must never be written
again. Full entries satisfy this if `no_prefix_reason` is None, and so do snapshots of recurrent states.

Layers of equal kinds share block tables. This module contains numbers only: no tensors, blocks or sequences."""

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
    """Data type of the KV cache. `name` is torch's name. Each head of a token is followed by `scale_bytes` bytes of scales."""

    name: str
    element_bytes: int
    scale_bytes: int = 0


FLOAT32 = KVDtype("float32", 4)


@dataclass(frozen=True, slots=True)
class AttentionKVSpec:
    """Keys and values of one layer for one token, [num_kv_heads, head_size] each. `latent`: only keys are stored, and the values
    are a part of them. `dtype`: None if it is not decided yet (see `MemoryKind.with_dtype`)."""

    num_kv_heads: int
    head_size: int
    latent: bool = False
    dtype: KVDtype | None = None

    @property
    def num_kv_tensors(self) -> int:
        return 1 if self.latent else 2

    @property
    def known_dtype(self) -> KVDtype:
        """Data type of the keys and values. Raises ValueError if it is not decided yet."""
        if self.dtype is None:
            raise ValueError("the KV cache of a layer has no dtype yet: see MemoryKind.with_dtype")
        return self.dtype

    @property
    def elements(self) -> int:
        """Number of stored elements for one head of one token, including scales."""
        return self.head_size + self.known_dtype.scale_bytes // self.known_dtype.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys, or of its values, in a page."""
        return self.num_kv_heads * (self.head_size * self.known_dtype.element_bytes + self.known_dtype.scale_bytes)


@dataclass(frozen=True, slots=True)
class RecurrentStateSpec:
    """Shapes of the float32 tensors that a recurrent layer keeps for each sequence. They do not depend on its length."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each tensor in the state, followed by the size of the state in bytes."""
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
        return 1

    def with_dtype(self, dtype: KVDtype) -> Self:
        """Return this kind with keys and values of `dtype`, if their dtype is not decided yet."""
        return self

    def entry_tokens(self, block_size: int) -> int:
        return _ALL

    def num_entries(self, num_tokens: int, block_size: int) -> int:
        """Return the number of entries for the first `num_tokens` tokens of a sequence."""
        return -(-num_tokens // self.entry_tokens(block_size))

    def num_tokens(self, num_entries: int, block_size: int) -> int:
        """Return the maximum number of tokens that the first `num_entries` entries cover."""
        return min(num_entries * self.entry_tokens(block_size), _ALL)

    def max_entries(self, num_tokens: int, max_step_tokens: int, block_size: int) -> int:
        """Return the maximum number of entries that a sequence of `num_tokens` tokens has at the same time, if each step
        computes at most `max_step_tokens` of its tokens."""
        return self.num_entries(num_tokens, block_size)

    def first_in_window(self, position: int) -> int:
        """Return the first token that queries at or after `position` read. Entries before that token's entry are freed."""
        return 0

    def reserved_to(self, start: int, num_tokens: int, max_step_tokens: int) -> int:
        """Return the number of tokens for which entries are reserved before a sequence of `num_tokens` starts. Its first step
        begins at token `start`."""
        return num_tokens

    def longest_prefix(
        self, names: Sequence[object], num_entries: int, cached: Container[object], block_size: int
    ) -> int:
        """Return an upper bound of the usable prefix, in entries, at most `num_entries`. `names`: name of each entry of the
        sequence. `cached`: names in the prefix cache. A prefix of that length has the entries that the next query reads, if the
        bound is exact.

        The bound may be too large if entries are missing before the last ones. The caller then tries again with fewer entries."""
        return 0


class _Attention(_Kind):
    __slots__ = ()
    kv: AttentionKVSpec

    @property
    def num_kv_tensors(self) -> int:
        return self.kv.num_kv_tensors


class _Tokens(_Attention):
    """Keys and values of tokens. An entry covers the tokens of one block, and does not change once they are computed."""

    __slots__ = ()
    grows = True

    def entry_tokens(self, block_size: int) -> int:
        return block_size


@dataclass(frozen=True, slots=True)
class Full(_Tokens):
    """Keys and values of all tokens. A prefix is a hit if all its blocks are cached."""

    kv: AttentionKVSpec

    def with_dtype(self, dtype: KVDtype) -> Self:
        return self if self.kv.dtype is not None else replace(self, kv=replace(self.kv, dtype=dtype))

    def longest_prefix(
        self, names: Sequence[object], num_entries: int, cached: Container[object], block_size: int
    ) -> int:
        """Return the length of the longest cached prefix, found by bisection. This assumes that no block after a missing one is
        cached, which is nearly always true, since blocks of a sequence are used and evicted together."""
        return bisect_left(names, True, hi=num_entries, key=lambda name: name not in cached)

    def __str__(self) -> str:
        return "see all tokens"


@dataclass(frozen=True, slots=True)
class Window(_Tokens):
    """Keys and values of the last tokens. A query reads its own token and the `window` - 1 tokens before it. Blocks before the
    window are freed while the sequence runs. A prefix is a hit if the blocks of its last window are cached."""

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
        """Return the number of tokens for which entries are reserved at the start. For later tokens, the sequence reuses as many
        blocks as its window frees."""
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
    """Sliding window in which all tokens of a prompt attend to each other at any distance. Generated tokens attend to the
    window."""

    no_prefix_reason = _SEES_WHOLE_PROMPTS
    in_one_step = True


@dataclass(frozen=True, slots=True)
class Cross(_Attention):
    """Keys and values of an encoder's outputs, `num_outputs` for each sequence. The sequence's first step writes them, and all
    its tokens read them. They belong to no token, so they are never shared, and a prefix can be a hit without them."""

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
        """Return `position`, because queries read the encoder's outputs and no earlier token of their sequence."""
        return position

    def longest_prefix(
        self, names: Sequence[object], num_entries: int, cached: Container[object], block_size: int
    ) -> int:
        return num_entries

    def __str__(self) -> str:
        return f"see {self.num_outputs:,} outputs of an encoder"


@dataclass(frozen=True, slots=True)
class Nothing(_Kind):
    """No memory: a query attends only to tokens of its own step. The block table stays empty and exists for the step's metadata."""

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
    """Recurrent state: one entry for the whole sequence, which each step overwrites. It is not cleared; a row that starts at
    position 0 ignores the old content. A snapshot is a copy of the state. It is cached under the name of the last block of
    tokens that it includes. A prefix is a hit if a snapshot exists for its end."""

    order = 4
    is_replaced = True
    state: RecurrentStateSpec

    def first_in_window(self, position: int) -> int:
        """Return the last token before `position`, because the state after that token includes all earlier ones."""
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
