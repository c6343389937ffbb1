"""Division of a Hopper multiprocessor's registers and shared memory between multiplying warpgroups and a copying warpgroup; source
text of matrix instructions."""

from __future__ import annotations

from collections.abc import Iterable

MANY_ROWS = 64  # rows of x whose sums need more registers than a multiprocessor has for all threads
ALIGNMENT = 1024  # of tiles in shared memory, in bytes
SHARED_BYTES = 227 << 10  # per block
_SHARED_OF_ALL = 228 << 10  # per multiprocessor, which adds 1 KiB to each block's request
_BARRIERS = 256  # bytes
_REGISTERS = 65536
_LEFT = 40  # registers per thread that releases its others


def threads(rows: int, warpgroups: int) -> int:
    """Return the number of threads per block for `rows` rows of x: the multiplying warpgroups, and a copying warpgroup,
    which releases registers, or a copying warp."""
    return warpgroups * 128 + (128 if rows >= MANY_ROWS else 32)


def registers(rows: int, warpgroups: int, blocks: int) -> int:
    """Return the registers per multiplying thread with `blocks` on a multiprocessor; 0 if all threads have the same number."""
    if rows < MANY_ROWS:
        return 0
    num_threads = threads(rows, warpgroups)
    at_start = _REGISTERS // (blocks * num_threads) // 8 * 8
    return min(240, (at_start * num_threads - _LEFT * 128) // (128 * warpgroups) // 8 * 8)


def stages(stage_bytes: int, blocks: int, spare_bytes: int = 0) -> int:
    """Return the number of stages, at most 16, that fit in the shared memory of each block besides `spare_bytes`."""
    return min(16, (_SHARED_OF_ALL // blocks - 1024 - ALIGNMENT - _BARRIERS - spare_bytes) // stage_bytes)


def splits(num_tiles: int, places: int, chunks: int) -> int:
    """Return the number of parts of K. A cluster costs two barriers, so K is split only while all blocks are resident and
    each has four chunks. A cluster lies within a part of the device, so clusters of eight blocks cannot use every place."""
    return max(
        s for s in (1, 2, 4, 8) if s == 1 or (num_tiles * s <= places * (0.85 if s == 8 else 1) and chunks >= 4 * s)
    )


def products(sizes: Iterable[int], *, of_codes: bool = False, out_of_registers: bool = False) -> str:
    """Return C++ of `Products<ROWS>::add` for each number of rows of x, since templates cannot vary the number of operands:
    sums (+)= weight x^T of 16 columns of 16-bit floats, or 32 `of_codes` E4M3; the weight is in shared memory or registers."""
    return "\n".join(_product(rows, of_codes, out_of_registers) for rows in sorted(set(sizes)))


def _product(rows: int, of_codes: bool, out_of_registers: bool) -> str:
    count = rows // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    bound = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    numbers = "k32.f32.e4m3.e4m3" if of_codes else 'k16.f32." HALF "." HALF "'
    words = 4 if out_of_registers else 1
    weight, declared, given = f"%{count}", "u64 weight", '"l"(weight)'
    if out_of_registers:
        weight = f"{{{', '.join(f'%{count + i}' for i in range(4))}}}"
        declared, given = "const u32 (&weight)[4]", ", ".join(f'"r"(weight[{i}])' for i in range(4))
    # Both sides with their sign. Only 16-bit floats support a transposed side in shared memory.
    ends = ", 1, 1" + ("" if of_codes else ", 0" if out_of_registers else ", 0, 0")
    return f"""
template <> __device__ __forceinline__ void Products<{rows}>::add(float (&sums)[{count}], {declared}, u64 x, int begun) {{
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + words + 1}, 0; wgmma.mma_async.sync.aligned.m64n{rows}{numbers}"
    " {{{sums}}}, {weight}, %{count + words}, p{ends};}}" : {bound} : {given}, "l"(x), "r"(begun));
}}"""
