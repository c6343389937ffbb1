"""Numbers that are measured on a device and decide which kernel runs: meaning, unit, and how each was measured.

The values are in *.json beside this file; here are the types. What no measurement decides stays with its kernel. No number
changes a result beyond the order of a sum."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(gt=0)]


class Numbers(Struct, frozen=True, forbid_unknown_fields=True):
    """Group of numbers; a file must contain exactly its fields."""


class PaddedProduct(Numbers, frozen=True):
    """Numbers of rows that cuBLAS multiplies by a weight [out_features, in_features] more slowly than `as_rows`."""

    out_features: Count
    in_features: Count
    min_rows: Count
    max_rows: Count
    as_rows: Count


class LinearTuning(Numbers, frozen=True):
    """Thresholds that choose the kernel of a linear layer [out_features, in_features] by rows of x. Measured in a captured
    graph over whole layers of the 0.6B, 1.7B and 8B shapes (tests/benches/ops/cuda.py): where cuBLAS cannot fill the device
    with its tiles, and where it needs a second launch for the activation."""

    max_streamed_rows: Count  # rows up to which few_rows.cu, a stream of the weight, wins at every size
    small_weight: Count  # elements up to which a weight is streamed at as many rows as few_rows.cu takes
    narrow_out_features: (
        Count  # out features up to which cuBLAS leaves the device half empty: tiled.cu takes all its rows
    )
    huge_out_features: Count  # out features, as of a vocabulary's head, from which tiled.cu wins again
    max_tiled_rows: (
        Count  # rows up to which it does, and where a gate's activation is in the same launch, and for small weights
    )
    shallow_in_features: Count  # in features below which cuBLAS wins back small weights ...
    max_shallow_rows: Count  # ... up to so many rows
    max_ahead_bytes: Count | None  # read next that a kernel of few rows brings into the second-level cache; None: none
    max_tiled_rows_plus: (
        Count  # rows up to which tiled.cu adds what adapters add where it ends, instead of kernels behind it
    )
    max_split_blocks: Count  # blocks of tiled.cu up to which K is cut in two: a cluster's barriers cost more beyond
    # 448 rows of 8B's gate and up take cuBLAS 267 us, by a tile of 512 x 64, and padded to 464 161; 832 rows of 32B's down 469
    # and 329.
    padded: tuple[PaddedProduct, ...]


class CodedTuning(Numbers, frozen=True):
    """Linear layers whose weight is in codes and scales (gemm/coded.py), measured by tests/benches/ops/coded.py."""

    min_widened_rows: (
        Count  # rows from which on a weight in four bits that Triton reads becomes plain numbers first ...
    )
    small_weight: Count  # ... and elements up to which it does at any number of rows
    max_streamed_rows: Count  # rows up to which few_rows_coded.cu beats tiled_w4.cu for four bits ...
    max_streamed_out_features: Count  # ... where there are so few out features that those tiles need clusters
    max_tiled_rows: Count  # rows up to which tiled_w4.cu is quicker than plain numbers
    max_rounded_rows: Count  # rows up to which tiled_fp8.cu beats cuBLAS ...
    narrow_out_features: Count  # ... and out features up to which cuBLAS leaves the device half empty
    max_narrow_rows: Count  # up to so many rows


class DecodeBlock(Numbers, frozen=True):
    """Block of decode.cu: its warps, and how many such blocks must fit into the registers of a multiprocessor."""

    warps: Count
    num_blocks: Count


class DecodeTuning(Numbers, frozen=True):
    """decode.cu, by pairs of request and kv head. Measured with contexts of 576 keys, and with mixed ones of 100 to 2048 keys, the
    longest first: wide blocks even out long contexts, narrow ones are quicker where pairs fill the device twice or three times, few
    pairs get a cluster of blocks each. Where pairs fill the device many times, blocks that start beside a linear layer of four bits
    gain nothing and the rest take longer (8B in steps, us a layer behind qkv, 256, 512, 1,024 and 2,048 pairs: 22.7, 46.9, 91.6 and
    180, and 24.0, 45.3, 78.2 and 164 if none starts early; the layer of 512 pairs is 2 % quicker where they do)."""

    wide: DecodeBlock
    narrow: DecodeBlock
    narrow_bytes: DecodeBlock  # of caches of eight bits, for any number of pairs from the first on
    head_size_256: DecodeBlock  # at any number of pairs
    min_narrow_pairs: Count  # the first number of pairs that narrow blocks take
    max_narrow_pairs: Count  # and the last, of caches in 16 bits
    clustered_pairs: Count  # a pair gets this over the number of pairs, rounded down, blocks, one at least
    max_early_pairs: Count  # pairs up to which blocks may start while the kernel before is not done
    max_splits: Count  # blocks of a pair


class QueryTiles(Numbers, frozen=True):
    """Program over prompt queries (triton_paged.py): `rows` queries (times heads if packed), `keys` at a time."""

    rows: Count
    keys: Count
    warps: Count
    stages: Count
    packed: bool


class KeySplits(Numbers, frozen=True):
    """Program over the keys of one query (triton_paged.py): `keys` at a time, at least `min_keys` per split."""

    keys: Count
    warps: Count
    stages: Count
    min_keys: Count


class PagedTuning(Numbers, frozen=True):
    """Paged attention in Triton, by lanes of a head (its size, up to a power of two): 64, 128, 256."""

    prefill: dict[int, QueryTiles]  # 16-bit queries, where tiles fill the device
    small_prefill: dict[int, QueryTiles]  # where `prefill` would leave multiprocessors idle
    float32_prefill: dict[int, QueryTiles]
    decode: dict[int, KeySplits]


class WithinStepTuning(Numbers, frozen=True):
    """Attention within a step under a full mask (triton_packed.py), 16-bit, if tiles fill the device; other cases use paged
    attention's tiles. `full`: by lanes of a head. With 64 lanes, 8,192 tokens in texts of 512 and 12 heads: 50 us, instead
    of 61 with 128 keys and 8 warps."""

    full: dict[int, QueryTiles]
    biased: (
        QueryTiles  # with a bias by distance, whose tile of float32 takes shared memory, too; at any number of lanes
    )


class LatentTiles(Numbers, frozen=True):
    """Program of latent attention: `rows` queries times heads, `keys` at a time, at least `min_keys` per split."""

    rows: Count
    keys: Count
    warps: Count
    stages: Count
    min_keys: Count


class LatentTuning(Numbers, frozen=True):
    """Latent attention in Triton: 16-bit and float32, one query and many."""

    prefill: LatentTiles
    decode: LatentTiles
    float32_prefill: LatentTiles
    float32_decode: LatentTiles


class AttentionTuning(Numbers, frozen=True):
    """Numbers of all attention kernels over the paged cache.

    min_prefill_queries: queries of a row from which prefill.cu, with tiles of 128 queries of one head, is faster than the
    Triton kernel, whose smaller tiles can hold all heads of a group. Measured by tests/benches/ops/prefill.py."""

    min_prefill_queries: Count
    min_widened_queries: Count  # of a row, from which what it sees of a cache of fp8 is widened before prefill.cu, once
    max_widened_bytes: Count  # in 16 bits, of all that is widened at once
    max_splits: Count  # of one context over Triton's programs: more cost more to join than they save
    programs_per_multiprocessor: Count  # that a context is split to reach
    paged: PagedTuning
    within_step: WithinStepTuning
    latent: LatentTuning
    decode: DecodeTuning


class ProductTiles(Numbers, frozen=True):
    """Program of a grouped matrix product: `rows` pairs of token and expert by `columns`, in steps of `depth` along the sum."""

    rows: Count
    columns: Count
    depth: Count
    warps: Count
    stages: Count


class ExpertTiles(Numbers, frozen=True):
    """Tiles of both products for steps with up to `max_pairs` pairs per expert on average (None: any number)."""

    max_pairs: Annotated[float, Meta(gt=0)] | None
    gate_up: ProductTiles
    down: ProductTiles


class ExpertTuning(Numbers, frozen=True):
    """Mixture of experts in Triton, by ascending `max_pairs`, the last None. Measured by tests/benches/ops/moe.py."""

    half: tuple[ExpertTiles, ...]  # 16-bit weights
    float32: tuple[ExpertTiles, ...]


class SamplingTuning(Numbers, frozen=True):
    """Sampling in Triton, over rows of logits."""

    pool: Count  # logits that the program which filters a row holds in registers
    prepare_programs: Count  # of the pass that adjusts all rows, about: some four a multiprocessor
    tiles: tuple[Count, ...]  # logits of a program, falling: the first that leaves `min_programs` programs, or the last
    min_programs: Count  # some two a multiprocessor


class RecurrentTuning(Numbers, frozen=True):
    """Recurrent layers in Triton: sizes of one program, with its warps. `single`: for requests of one token in the step."""

    conv_tokens: Count
    conv_channels: Count
    scan_rows: (
        Count  # Mamba-2: dims of a head of a state of [rows, 128]; 64 are what the warps keep beside the tiles it meets
    )
    scan_warps: Count
    single_scan_rows: Count
    single_scan_warps: Count
    selective_channels: Count  # Mamba
    selective_warps: Count
    delta_columns: Count  # gated delta rule: value dims
    delta_warps: Count
    single_delta_columns: Count
    single_delta_warps: Count
    chunk: Count  # tokens multiplied at once
    float32_chunk: Count  # of three products each, whose parts are in shared memory at the same time


class Groups(Numbers, frozen=True):
    """Number groups of a tuning file."""

    linear: LinearTuning
    coded: CodedTuning
    attention: AttentionTuning
    experts: ExpertTuning
    sampling: SamplingTuning
    recurrent: RecurrentTuning


class Tuning(Groups, frozen=True):
    """Numbers of one device, including its number of `multiprocessors`."""

    multiprocessors: Count
