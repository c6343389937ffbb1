"""Sampling in Triton: four kernels over the tables, and one more for drafts, all capturable.

`_prepare` adjusts logits and computes group maxima, for rows that need it; `_filter`, one program per row, finds the threshold
of top-k, top-p and min-p; `_choose` takes the best token of every tile, `_join` the best of every row, and `_accept` accepts a
row's drafts up to the first that differs. A row that needs nothing of a kernel leaves it after one read of its record, so a
greedy row, and a plain random one, costs one pass over its logits.

`_filter` does not sort. Group maxima bound the threshold from below (the k-th largest of them is at most the k-th largest
logit), so that it reads only the groups that reach the bound, and then bisects over the ordered bits of floats."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tuning
from ops.launch import overlap, wait_for_previous
from ops.sampling import noise, tables
from ops.sampling.tables import Drafts, Masks, SamplingTables
from ops.sampling.triton_search import float_of, key_of, members, search, search_listed, sum_from, weights_of
from ops.tuning.numbers import SamplingTuning

GROUP = 32  # tokens surveyed together: 64 bytes of bfloat16

_RECORD = tl.constexpr(tables.RECORD)
_FLAGS = tl.constexpr(tables.FLAGS)
_INVERSE_TEMPERATURE = tl.constexpr(tables.INVERSE_TEMPERATURE)
_TOP_K = tl.constexpr(tables.TOP_K)
_TOP_P = tl.constexpr(tables.TOP_P)
_MIN_P_MARGIN = tl.constexpr(tables.MIN_P_MARGIN)
_SEED_LOW = tl.constexpr(tables.SEED_LOW)
_SEED_HIGH = tl.constexpr(tables.SEED_HIGH)
_PRESENCE = tl.constexpr(tables.PRESENCE)
_FREQUENCY = tl.constexpr(tables.FREQUENCY)
_REPETITION = tl.constexpr(tables.REPETITION)
_INVERSE_REPETITION = tl.constexpr(tables.INVERSE_REPETITION)
_NUM_BIASES = tl.constexpr(tables.NUM_BIASES)
_NUM_BANS = tl.constexpr(tables.NUM_BANS)
_FREE_FROM = tl.constexpr(tables.FREE_FROM)
_SAMPLED = tl.constexpr(tables.SAMPLED)
_FILTERED = tl.constexpr(tables.FILTERED)
_PENALIZED = tl.constexpr(tables.PENALIZED)
_BIASED = tl.constexpr(tables.BIASED)
_BANNED = tl.constexpr(tables.BANNED)
_MASKED = tl.constexpr(tables.MASKED)
_ADJUSTED = tl.constexpr(tables.PENALIZED | tables.BIASED | tables.BANNED | tables.MASKED)
_MAX_COUNT = tl.constexpr(tables.MAX_COUNT)
_NOT_FINITE = tl.constexpr(tables.NOT_FINITE)
_GOLDEN = tl.constexpr(noise.GOLDEN)
_MULTIPLIER_1 = tl.constexpr(noise.MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(noise.MULTIPLIER_2)
_OTHER_KEY = tl.constexpr(noise.OTHER_KEY)
_LARGEST = tl.constexpr(float(torch.finfo(torch.float32).max))
_INFINITY = tl.constexpr(float("inf"))


# --- a logits row's record ----------------------------------------------------------------------------------------------


@triton.jit
def _record(rows_ptr, positions_ptr, records_ptr, index):
    # The logits row's record, its row (-1: not sampled) and the flags that apply at its position.
    row = tl.load(rows_ptr + index)
    record_ptr = records_ptr + tl.maximum(row, 0).to(tl.int64) * _RECORD
    flags = tl.load(record_ptr + _FLAGS)
    banned = tl.load(positions_ptr + index) < tl.load(record_ptr + _FREE_FROM)
    flags = tl.where(banned, flags, flags & ~_BANNED)
    return record_ptr, row, tl.where(row < 0, 0, flags)


@triton.jit
def _float(word_ptr):
    return tl.load(word_ptr).to(tl.float32, bitcast=True)


# --- noise: the same integers as ops/sampling/noise.py --------------------------------------------------------------


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= _MULTIPLIER_1
    x ^= x >> 15
    x *= _MULTIPLIER_2
    return x ^ (x >> 15)


@triton.jit
def _gumbel(record_ptr, position, token):
    low = tl.load(record_ptr + _SEED_LOW).to(tl.uint32, bitcast=True)
    high = tl.load(record_ptr + _SEED_HIGH).to(tl.uint32, bitcast=True)
    place = _mix(position.to(tl.uint32) + _GOLDEN)
    first = _mix(_mix(place ^ low) ^ high)
    second = _mix(_mix((place + _OTHER_KEY) ^ high) ^ low)
    x = token.to(tl.uint32) * _GOLDEN + first
    x ^= x >> 16
    x *= _MULTIPLIER_1
    x ^= second
    x ^= x >> 15
    x *= _MULTIPLIER_2
    x ^= x >> 15
    v = ((x >> 1).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    v = tl.minimum(v, 1.0 - 2.0**-24)
    # -log(1 - v); the difference would lose a small v to rounding, so the series is used there.
    series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    exponential = tl.where(v < 0.1, series, -tl.log(1.0 - v))
    return -tl.log(exponential)


# --- adjusting and surveying ----------------------------------------------------------------------------------------


@triton.jit
def _find(ids_ptr, num, token, STEPS: tl.constexpr):
    # Position of each token among `num` < 2^STEPS ascending ids, and whether it is one of them.
    low = tl.zeros_like(token)
    high = low + num
    for _ in range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        below = tl.load(ids_ptr + middle, mask=searching, other=0) < token
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & ~below, middle, high)
    return low, tl.load(ids_ptr + low, mask=low < num, other=-1) == token


@triton.jit
def _adjust(
    x, token, inside, flags, record_ptr, counts_ptr, bias_ids_ptr, bias_values_ptr, ban_ids_ptr, mask_ptr, guess_ptr,
    BIAS_STEPS: tl.constexpr, BAN_STEPS: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    # Penalties, bias, bans and mask, in this order; the pointers are at the logits row's row, guess_ptr at the draft before it.
    if (flags & _PENALIZED) != 0:
        packed = tl.load(counts_ptr + token, mask=inside, other=0).to(tl.int32)
        if DRAFTS:  # drafts before it count as sampled
            guess = tl.load(guess_ptr)
            while guess >= 0:
                packed += ((token == guess) & ((packed & _MAX_COUNT) < _MAX_COUNT)).to(tl.int32)
                guess_ptr -= 1
                guess = tl.load(guess_ptr)
        repetition = tl.where(x > 0, _float(record_ptr + _INVERSE_REPETITION), _float(record_ptr + _REPETITION))
        x = tl.where(packed != 0, x * repetition, x)
        count = packed & _MAX_COUNT
        present = tl.where(count > 0, _float(record_ptr + _PRESENCE), 0.0)
        x -= count.to(tl.float32) * _float(record_ptr + _FREQUENCY) + present
    if (flags & _BIASED) != 0:
        where, found = _find(bias_ids_ptr, tl.load(record_ptr + _NUM_BIASES), token, BIAS_STEPS)
        x += tl.load(bias_values_ptr + where, mask=found, other=0.0)
    if (flags & _BANNED) != 0:
        _, found = _find(ban_ids_ptr, tl.load(record_ptr + _NUM_BANS), token, BAN_STEPS)
        x = tl.where(found, -_INFINITY, x)
    if (flags & _MASKED) != 0:
        word = tl.load(mask_ptr + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, -_INFINITY)
    return x


@triton.jit
def _prepare(
    logits_ptr, stride, rows_ptr, positions_ptr, records_ptr, counts_ptr, bias_ids_ptr, bias_values_ptr, ban_ids_ptr,
    masks_ptr, mask_rows_ptr, draft_ids_ptr, adjusted_ptr, group_max_ptr, group_mass_ptr,
    V: tl.constexpr, BIASES: tl.constexpr, BANS: tl.constexpr, WORDS: tl.constexpr,
    BIAS_STEPS: tl.constexpr, BAN_STEPS: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    DRAFTS: tl.constexpr, MASKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # logits [R, stride]; adjusted [R, V] float32; group_max, group_mass [R, GROUPS] float32: a group's largest
    # logit and its sum of exp((logit - largest) / temperature). Several tiles per program: most rows need none of this, and
    # ten thousand programs take ten microseconds to detect that.
    wait_for_previous(PDL)
    index = tl.program_id(1).to(tl.int64)
    record_ptr, row, flags = _record(rows_ptr, positions_ptr, records_ptr, index)
    if (flags & (_ADJUSTED | _FILTERED)) == 0:
        return
    row = row.to(tl.int64)
    mask_row = tl.load(mask_rows_ptr + index).to(tl.int64) if MASKS else row
    for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
        token = tile * TILE + tl.arange(0, TILE)
        inside = token < V
        x = tl.load(logits_ptr + index * stride + token, mask=inside, other=-_INFINITY).to(tl.float32)
        if (flags & _ADJUSTED) != 0:
            x = _adjust(
                x, token, inside, flags, record_ptr, counts_ptr + row * V, bias_ids_ptr + row * BIASES,
                bias_values_ptr + row * BIASES, ban_ids_ptr + row * BANS, masks_ptr + mask_row * WORDS,
                draft_ids_ptr + index, BIAS_STEPS, BAN_STEPS, DRAFTS,
            )  # fmt: skip
            tl.store(adjusted_ptr + index * V + token, x, mask=inside)
        if (flags & _FILTERED) != 0:
            members = tl.reshape(x, (TILE // GROUP, GROUP))
            largest = tl.max(members, 1)
            group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
            tl.store(group_max_ptr + index * GROUPS + group, largest, mask=group < GROUPS)
            if _float(record_ptr + _TOP_P) < 1.0:
                below = members - tl.maximum(largest, -_LARGEST)[:, None]
                mass = tl.sum(tl.exp(below * _float(record_ptr + _INVERSE_TEMPERATURE)), 1)
                tl.store(group_mass_ptr + index * GROUPS + group, mass, mask=group < GROUPS)


# --- filters: one threshold per row ----------------------------------------------------------------------------------


@triton.jit
def _filter(
    logits_ptr, stride, rows_ptr, positions_ptr, records_ptr, adjusted_ptr, group_max_ptr, group_mass_ptr, lists_ptr,
    thresholds_ptr, V: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, GROUP: tl.constexpr,
    POOL: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per row of logits. lists [R, GROUPS] int32: room for the groups worth reading. SHIFT: low bits that are equal in
    # all float32 images of the logits' dtype, until a penalty or bias is applied.
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64)
    record_ptr, _, flags = _record(rows_ptr, positions_ptr, records_ptr, index)
    if (flags & _FILTERED) == 0:
        return
    is_adjusted = (flags & _ADJUSTED) != 0
    logits_ptr += index * stride
    adjusted_ptr += index * V
    list_ptr = lists_ptr + index * GROUPS
    group = tl.arange(0, GROUPS_PAD)
    peaks = tl.load(group_max_ptr + index * GROUPS + group, mask=group < GROUPS, other=-_INFINITY)
    largest = tl.max(peaks, 0)
    if not (largest > -_INFINITY and largest < _INFINITY):
        tl.store(thresholds_ptr + index, -_LARGEST)  # _choose detects the reason
        return
    top_k = tl.load(record_ptr + _TOP_K)
    top_p = _float(record_ptr + _TOP_P)
    inverse_temperature = _float(record_ptr + _INVERSE_TEMPERATURE)
    margin = _float(record_ptr + _MIN_P_MARGIN)
    lowest = tl.maximum(largest + margin, -_LARGEST)
    shift = tl.where(is_adjusted, 0, SHIFT)
    high = key_of(largest, shift)
    bound = key_of(lowest, shift)
    peak_keys = key_of(peaks, shift)
    total = 0.0
    whole = (top_k == 0) & (margin == -_INFINITY)  # top-p, if any, applies to all tokens
    if top_k > 0:
        bound = search(peak_keys, tl.where(peaks >= lowest, 1.0, 0.0), top_k.to(tl.float32), bound, high)
    elif whole:
        mass = tl.load(group_mass_ptr + index * GROUPS + group, mask=group < GROUPS, other=0.0)
        share = tl.exp((peaks - largest) * inverse_temperature)
        total = tl.sum(mass * share, 0)
        # Slightly more than wanted, so that rounding cannot raise the bound above the threshold.
        bound = search(peak_keys, share, total * top_p * 1.0001, bound, high)
    listed = peak_keys >= bound
    tl.store(list_ptr + tl.cumsum(listed.to(tl.int32), 0) - 1, group, mask=listed)
    tl.debug_barrier()  # threads other than the writer read the list
    size = tl.sum(listed.to(tl.int32), 0) * GROUP
    key = bound
    if size <= POOL:
        x = members(logits_ptr, adjusted_ptr, is_adjusted, list_ptr, 0, size, V, GROUP, POOL)
        keys = key_of(x, shift)
        if top_k > 0:
            key = search(keys, tl.where(x >= lowest, 1.0, 0.0), top_k.to(tl.float32), key, high)
        if top_p < 1.0:
            weights = weights_of(x, largest, lowest, True, inverse_temperature)
            if not whole:
                total = tl.sum(tl.where(keys >= key, weights, 0.0), 0)
            key = search(keys, weights, total * top_p, key, high)
    else:
        if top_k > 0:
            key = search_listed(
                top_k.to(tl.float32), key, high, logits_ptr, adjusted_ptr, is_adjusted, list_ptr, size, largest,
                lowest, False, inverse_temperature, shift, V, GROUP, POOL,
            )  # fmt: skip
        if top_p < 1.0:
            if not whole:
                total = sum_from(
                    key, logits_ptr, adjusted_ptr, is_adjusted, list_ptr, size, largest, lowest, True,
                    inverse_temperature, shift, V, GROUP, POOL,
                )  # fmt: skip
            key = search_listed(
                total * top_p, key, high, logits_ptr, adjusted_ptr, is_adjusted, list_ptr, size, largest, lowest,
                True, inverse_temperature, shift, V, GROUP, POOL,
            )  # fmt: skip
    tl.store(thresholds_ptr + index, tl.maximum(float_of(key, shift), lowest))


# --- choosing ---------------------------------------------------------------------------------------------------------


@triton.jit
def _choose(
    logits_ptr, stride, rows_ptr, positions_ptr, records_ptr, adjusted_ptr, thresholds_ptr, best_ptr, best_id_ptr,
    V: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # best, best_id [R, TILES]: the best score of a tile, +inf where a logit is NaN or +inf, and its lowest token.
    wait_for_previous(PDL)
    index = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    token = tile * TILE + tl.arange(0, TILE)
    # Before the record is known: the two would otherwise wait one after the other.
    x = tl.load(logits_ptr + index * stride + token, mask=token < V, other=-_INFINITY).to(tl.float32)
    record_ptr, row, flags = _record(rows_ptr, positions_ptr, records_ptr, index)
    if row < 0:
        return
    if (flags & _ADJUSTED) != 0:
        x = tl.load(adjusted_ptr + index * V + token, mask=token < V, other=-_INFINITY)
    unusable = tl.max(((x != x) | (x == _INFINITY)).to(tl.int32), 0) != 0
    score = x
    if (flags & _SAMPLED) != 0:
        # Clamped: a huge logit over a small temperature must not become infinite.
        scaled = x * _float(record_ptr + _INVERSE_TEMPERATURE)
        scaled = tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)
        score = scaled + _gumbel(record_ptr, tl.load(positions_ptr + index), token)
        score = tl.where(x == -_INFINITY, -_INFINITY, score)
        if (flags & _FILTERED) != 0:
            score = tl.where(x >= tl.load(thresholds_ptr + index), score, -_INFINITY)
    best = tl.max(score, 0)
    tl.store(best_id_ptr + index * TILES + tile, tl.min(tl.where(score == best, token, V), 0))
    tl.store(best_ptr + index * TILES + tile, tl.where(unusable, _INFINITY, best))


@triton.jit
def _join(
    rows_ptr, positions_ptr, records_ptr, counts_ptr, last_ids_ptr, best_ptr, best_id_ptr, ids_ptr,
    V: tl.constexpr, TILES: tl.constexpr, TILES_PAD: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # With DRAFTS, results depend on all ids of a row.
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64)
    _, row, flags = _record(rows_ptr, positions_ptr, records_ptr, index)
    if row < 0:
        tl.store(ids_ptr + index, 0)
        return
    row = row.to(tl.int64)
    tile = tl.arange(0, TILES_PAD)
    scores = tl.load(best_ptr + index * TILES + tile, mask=tile < TILES, other=-_INFINITY)
    tokens = tl.load(best_id_ptr + index * TILES + tile, mask=tile < TILES, other=V)
    best = tl.max(scores, 0)
    token = tl.min(tl.where(scores == best, tokens, V), 0)
    usable = (best > -_INFINITY) & (best < _INFINITY)
    tl.store(ids_ptr + index, tl.where(usable, token, _NOT_FINITE).to(tl.int64))
    if not DRAFTS:
        tl.store(last_ids_ptr + row, tl.where(usable, token, 0).to(tl.int64))
        if ((flags & _PENALIZED) != 0) & usable:
            _count(counts_ptr + row * V + token)


@triton.jit
def _count(count_ptr):
    packed = tl.load(count_ptr)
    tl.store(count_ptr, tl.where((packed & _MAX_COUNT) < _MAX_COUNT, packed + 1, packed))


@triton.jit
def _guess_behind(rows_ptr, draft_ids_ptr, index, num_logits_rows):
    # Draft after which the next logits row was computed, below zero if it is another row's or there is none.
    inside = index + 1 < num_logits_rows
    asked = tl.load(rows_ptr + index + 1, mask=inside, other=-1) >= 0
    return tl.load(draft_ids_ptr + index + 1, mask=asked, other=-1)


@triton.jit(do_not_specialize=["num_logits_rows"])
def _accept(
    rows_ptr, positions_ptr, records_ptr, counts_ptr, last_ids_ptr, draft_ids_ptr, num_computed_ptr, ids_ptr,
    num_logits_rows, V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per logits row; only the first logits row of each row does work: see `Drafts`.
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64)
    _, row, flags = _record(rows_ptr, positions_ptr, records_ptr, index)
    if (row < 0) | (tl.load(draft_ids_ptr + index) >= 0):
        return
    row = row.to(tl.int64)
    token = tl.load(ids_ptr + index)
    guess = _guess_behind(rows_ptr, draft_ids_ptr, index, num_logits_rows)
    while (guess >= 0) & (guess == token):
        if (flags & _PENALIZED) != 0:
            _count(counts_ptr + row * V + token)
            tl.debug_barrier()  # the next count may be of the same token, and threads other than the writer read it
        index += 1
        token = tl.load(ids_ptr + index)
        guess = _guess_behind(rows_ptr, draft_ids_ptr, index, num_logits_rows)
    if ((flags & _PENALIZED) != 0) & (token >= 0):
        _count(counts_ptr + row * V + token)
    tl.store(last_ids_ptr + row, tl.maximum(token, 0))
    num_left = 0
    index += 1
    while tl.load(draft_ids_ptr + index, mask=index < num_logits_rows, other=-1) >= 0:
        num_left += 1
        index += 1
    num_computed = tl.load(num_computed_ptr + row)
    tl.store(num_computed_ptr + row, num_computed - num_left)


# --- launching ----------------------------------------------------------------------------------------------------------

_EQUAL_LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def sample(
    logits: Tensor, sample_rows: Tensor, sample_positions: Tensor, last_ids: Tensor, tables: SamplingTables,
    drafts: Drafts | None = None, masks: Masks | None = None,
) -> Tensor:  # fmt: skip
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return ids
    by = tuning.of(logits.device).sampling
    tile = choose_tile(num_rows, vocab_size, by)
    num_tiles = triton.cdiv(vocab_size, tile)
    num_groups = triton.cdiv(vocab_size, GROUP)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": logits.device}
    integers: dict[str, Any] = {"dtype": torch.int32, "device": logits.device}
    adjusted = torch.empty((num_rows, vocab_size), **floats)  # used only for rows that need it
    group_max, group_mass = (torch.empty((num_rows, num_groups), **floats) for _ in range(2))
    lists = torch.empty((num_rows, num_groups), **integers)
    thresholds = torch.empty(num_rows, **floats)
    best = torch.empty((num_rows, num_tiles), **floats)
    best_ids = torch.empty((num_rows, num_tiles), **integers)
    records = (sample_rows, sample_positions, tables.records)
    has_drafts = drafts is not None
    draft_ids = sample_rows if drafts is None else drafts.ids  # any tensor, which is not read
    mask_rows, words = (sample_rows, tables.masks) if masks is None else masks
    num_biases, num_bans = tables.bias_ids.shape[1], tables.ban_ids.shape[1]
    launch = overlap(logits.device)
    warps = tile // 512  # 16 logits per thread: two 16-byte loads of bfloat16
    _prepare[(min(num_tiles, triton.cdiv(by.prepare_programs, num_rows)), num_rows)](
        logits, logits.stride(0), *records, tables.counts, tables.bias_ids, tables.bias_values, tables.ban_ids,
        words, mask_rows, draft_ids, adjusted, group_max, group_mass, V=vocab_size, BIASES=num_biases, BANS=num_bans,
        WORDS=words.shape[1],
        BIAS_STEPS=num_biases.bit_length(), BAN_STEPS=num_bans.bit_length(), GROUPS=num_groups, GROUP=GROUP,
        TILES=num_tiles, TILE=tile, DRAFTS=has_drafts, MASKS=masks is not None, num_warps=warps, **launch,
    )  # fmt: skip
    _filter[(num_rows,)](
        logits, logits.stride(0), *records, adjusted, group_max, group_mass, lists, thresholds, V=vocab_size,
        GROUPS=num_groups, GROUPS_PAD=triton.next_power_of_2(num_groups), GROUP=GROUP, POOL=by.pool,
        SHIFT=_EQUAL_LOW_BITS[logits.dtype], num_warps=16, **launch,
    )  # fmt: skip
    _choose[(num_tiles, num_rows)](
        logits, logits.stride(0), *records, adjusted, thresholds, best, best_ids, V=vocab_size, TILES=num_tiles,
        TILE=tile, num_warps=warps, **launch,
    )  # fmt: skip
    _join[(num_rows,)](
        *records, tables.counts, last_ids, best, best_ids, ids, V=vocab_size, TILES=num_tiles,
        TILES_PAD=triton.next_power_of_2(num_tiles), DRAFTS=has_drafts, num_warps=1, **launch,
    )  # fmt: skip
    if drafts is not None:
        _accept[(num_rows,)](
            *records, tables.counts, last_ids, draft_ids, drafts.num_computed, ids, num_rows, V=vocab_size,
            num_warps=1, **launch,
        )  # fmt: skip
    return ids


def choose_tile(num_rows: int, vocab_size: int, by: SamplingTuning) -> int:
    """Return the largest tile that occupies the device; a batch of one is spread over more than a hundred programs."""
    *larger, smallest = by.tiles
    return next((tile for tile in larger if num_rows * triton.cdiv(vocab_size, tile) >= by.min_programs), smallest)
