"""Search for a threshold among a row's logits, in Triton: bisection over the ordered bits of floats, of logits in registers
or in listed groups."""

from __future__ import annotations

import triton
import triton.language as tl

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def key_of(x, shift):
    # Integers in the order of the floats. `shift` drops bits that are equal in all of them.
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@triton.jit
def float_of(key, shift):
    bits = key << shift
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def middle_of(low, high):
    # Above low, at most high; their difference may not fit 32 bits.
    return (low.to(tl.int64) + (high.to(tl.int64) - low.to(tl.int64) + 1) // 2).to(tl.int32)


@triton.jit
def search(keys, weights, wanted, low, high):
    # The largest of low..high from which on the weights' sum is `wanted` at least; low if there is none.
    while low < high:
        middle = middle_of(low, high)
        enough = tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def logits_at(logits_ptr, adjusted_ptr, is_adjusted, token, inside):
    # logits and adjusted of one row; -inf outside.
    if is_adjusted:
        x = tl.load(adjusted_ptr + token, mask=inside, other=-_INFINITY)
    else:
        x = tl.load(logits_ptr + token, mask=inside, other=-_INFINITY).to(tl.float32)
    return x


@triton.jit
def members(logits_ptr, adjusted_ptr, is_adjusted, list_ptr, start, size, V, GROUP: tl.constexpr, POOL: tl.constexpr):
    # Logits start to start + POOL of the `size` in listed groups.
    index = start + tl.arange(0, POOL)
    inside = index < size
    token = tl.load(list_ptr + index // GROUP, mask=inside, other=0) * GROUP + index % GROUP
    return logits_at(logits_ptr, adjusted_ptr, is_adjusted, token, inside & (token < V))


@triton.jit
def weights_of(x, largest, lowest, by_mass, inverse_temperature):
    one = tl.where(by_mass, tl.exp((x - largest) * inverse_temperature), 1.0)
    return tl.where(x >= lowest, one, 0.0)


@triton.jit
def sum_from(
    key, logits_ptr, adjusted_ptr, is_adjusted, list_ptr, size, largest, lowest, by_mass, inverse_temperature, shift,
    V: tl.constexpr, GROUP: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((POOL,), tl.float32)
    for start in range(0, size, POOL):
        x = members(logits_ptr, adjusted_ptr, is_adjusted, list_ptr, start, size, V, GROUP, POOL)
        weights = weights_of(x, largest, lowest, by_mass, inverse_temperature)
        total += tl.where(key_of(x, shift) >= key, weights, 0.0)
    return tl.sum(total, 0)


@triton.jit
def search_listed(
    wanted, low, high, logits_ptr, adjusted_ptr, is_adjusted, list_ptr, size, largest, lowest, by_mass,
    inverse_temperature, shift, V: tl.constexpr, GROUP: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    # `search` over more logits than registers hold: reads them once per bit.
    while low < high:
        middle = middle_of(low, high)
        total = sum_from(
            middle, logits_ptr, adjusted_ptr, is_adjusted, list_ptr, size, largest, lowest, by_mass,
            inverse_temperature, shift, V, GROUP, POOL,
        )  # fmt: skip
        enough = total >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low
