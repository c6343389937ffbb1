"""Numbers that are measured on a device and decide which kernel runs: meaning, unit, and how each was measured.

The values are in *.json beside this file; here are the types. What no measurement decides stays with its kernel. No number
changes a result beyond the order of a sum."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaddedProduct:
    """Numbers of rows for which cuBLAS takes longer, with a weight [out_features, in_features], than for `as_rows`."""

    out_features: int
    in_features: int
    min_rows: int
    max_rows: int
    as_rows: int


@dataclass(frozen=True, slots=True)
class LinearTuning:
    """Thresholds that choose the kernel of a linear layer [out_features, in_features] by rows of x. Measured in a captured
    graph over whole layers of the 0.6B, 1.7B and 8B shapes (tests/benches/ops/cuda.py): where cuBLAS cannot fill the device
    with its tiles, and where it needs a second launch for the activation."""

    max_streamed_rows: int  # rows up to which few_rows.cu, a stream of the weight, wins at every size
    small_weight: int  # elements up to which a weight is streamed at as many rows as few_rows.cu takes
    narrow_out_features: (
        int  # out features up to which cuBLAS leaves the device half empty: tiled.cu takes all its rows
    )
    huge_out_features: int  # out features, as of a vocabulary's head, from which tiled.cu wins again
    max_tiled_rows: (
        int  # rows up to which it does, and where a gate's activation is in the same launch, and for small weights
    )
    shallow_in_features: int  # in features below which cuBLAS wins back small weights ...
    max_shallow_rows: int  # ... up to so many rows
    max_ahead_bytes: int | None  # read next that a kernel of few rows brings into the second-level cache; None: none
    max_tiled_rows_plus: (
        int  # rows up to which tiled.cu adds what adapters add where it ends, instead of kernels behind it
    )
    max_split_blocks: int  # blocks of tiled.cu up to which K is cut in two: a cluster's barriers cost more beyond
    # 448 rows of 8B's gate and up take cuBLAS 267 us, by a tile of 512 x 64, and padded to 464 161; 832 rows of 32B's down 469
    # and 329.
    padded: tuple[PaddedProduct, ...]


@dataclass(frozen=True, slots=True)
class CodedTuning:
    """Linear layers whose weight is in codes and scales (gemm/coded.py), measured by tests/benches/ops/coded.py."""

    min_widened_rows: int  # rows from which on a weight in four bits that Triton reads becomes plain numbers first ...
    small_weight: int  # ... and elements up to which it does at any number of rows
    max_streamed_rows: int  # rows up to which few_rows_coded.cu beats tiled_w4.cu for four bits ...
    max_streamed_out_features: int  # ... where there are so few out features that those tiles need clusters
    max_tiled_rows: int  # rows up to which tiled_w4.cu is quicker than plain numbers
    max_rounded_rows: int  # rows up to which tiled_fp8.cu beats cuBLAS ...
    narrow_out_features: int  # ... and out features up to which cuBLAS leaves the device half empty
    max_narrow_rows: int  # up to so many rows


@dataclass(frozen=True, slots=True)
class DecodeBlock:
    """A block of decode.cu: its warps, and how many such blocks the registers of a multiprocessor must hold."""

    warps: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """decode.cu, by pairs of request and kv head. Measured with contexts of 576 keys, and with mixed ones of 100 to 2048 keys, the
    longest first: wide blocks even out long contexts, narrow ones are quicker where pairs fill the device twice or three times, few
    pairs get a cluster of blocks each. Where pairs fill the device many times, blocks that start beside a linear layer of four bits
    gain nothing and the rest take longer (8B in steps, us a layer behind qkv, 256, 512, 1,024 and 2,048 pairs: 22.7, 46.9, 91.6 and
    180, and 24.0, 45.3, 78.2 and 164 if none starts early; the layer of 512 pairs is 2 % quicker where they do)."""

    wide: DecodeBlock
    narrow: DecodeBlock
    narrow_bytes: DecodeBlock  # of caches of eight bits, for any number of pairs from the first on
    head_size_256: DecodeBlock  # at any number of pairs
    min_narrow_pairs: int  # the first number of pairs that narrow blocks take
    max_narrow_pairs: int  # and the last, of caches in 16 bits
    clustered_pairs: int  # a pair gets this over the number of pairs, rounded down, blocks, one at least
    max_early_pairs: int  # pairs up to which blocks may start while the kernel before is not done
    max_splits: int  # blocks of a pair


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """A program over queries of prompts (triton_paged.py): `rows` queries (times heads, if a group is packed), `keys` at a time."""

    rows: int
    keys: int
    warps: int
    stages: int
    packed: bool


@dataclass(frozen=True, slots=True)
class KeySplits:
    """A program over the keys of one query (triton_paged.py): `keys` at a time, at least `min_keys` of them to a split."""

    keys: int
    warps: int
    stages: int
    min_keys: int


@dataclass(frozen=True, slots=True)
class PagedTuning:
    """Paged attention in Triton, by lanes of a head (its size, up to a power of two): 64, 128, 256."""

    prefill: dict[int, QueryTiles]  # 16-bit queries, where tiles fill the device
    small_prefill: dict[int, QueryTiles]  # where `prefill` would leave multiprocessors idle
    float32_prefill: dict[int, QueryTiles]
    decode: dict[int, KeySplits]


@dataclass(frozen=True, slots=True)
class WithinStepTuning:
    """Attention of rows that see all of their own step (triton_packed.py), 16-bit, where tiles fill the device; the rest is tiled
    as paged attention is. `full`: by lanes of a head; those of 64 by 8,192 tokens in texts of 512, and 12 heads: 50 us, while 128
    keys and 8 warps took 61."""

    full: dict[int, QueryTiles]
    biased: (
        QueryTiles  # with a bias by distance, whose tile of float32 takes shared memory, too; at any number of lanes
    )


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """A program of latent attention: `rows` queries times heads, `keys` at a time, at least `min_keys` of them to a split."""

    rows: int
    keys: int
    warps: int
    stages: int
    min_keys: int


@dataclass(frozen=True, slots=True)
class LatentTuning:
    """Latent attention in Triton: 16-bit and float32, one query and many."""

    prefill: LatentTiles
    decode: LatentTiles
    float32_prefill: LatentTiles
    float32_decode: LatentTiles


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """All kernels of attention over the paged cache.

    min_prefill_queries: of a row, from which prefill.cu, a tile of 128 queries of one head, beats the Triton kernel, whose tiles
    are smaller and can hold all the heads of a group. Measured by tests/benches/ops/prefill.py."""

    min_prefill_queries: int
    min_widened_queries: int  # of a row, from which what it sees of a cache of fp8 is widened before prefill.cu, once
    max_widened_bytes: int  # in 16 bits, of all that is widened at once
    max_splits: int  # of one context over Triton's programs: more cost more to join than they save
    programs_per_multiprocessor: int  # that a context is split to reach
    paged: PagedTuning
    within_step: WithinStepTuning
    latent: LatentTuning
    decode: DecodeTuning


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """One program of a grouped matrix product: `rows` pairs of token and expert by `columns`, in steps of `depth` along the sum."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The products of a step that brings an expert up to `max_pairs` pairs on average (None: any number)."""

    max_pairs: float | None
    gate_up: ProductTiles
    down: ProductTiles


@dataclass(frozen=True, slots=True)
class ExpertTuning:
    """Mixture of experts in Triton; `max_pairs` rise, the last is None. Measured by tests/benches/ops/moe.py."""

    half: tuple[ExpertTiles, ...]  # 16-bit weights
    float32: tuple[ExpertTiles, ...]


@dataclass(frozen=True, slots=True)
class SamplingTuning:
    """Sampling in Triton, over rows of logits."""

    pool: int  # logits that the program which filters a row holds in registers
    prepare_programs: int  # of the pass that adjusts all rows, about: some four a multiprocessor
    tiles: tuple[int, ...]  # logits of a program, falling: the first that leaves `min_programs` programs, or the last
    min_programs: int  # some two a multiprocessor


@dataclass(frozen=True, slots=True)
class RecurrentTuning:
    """Recurrent layers in Triton: sizes of one program, with its warps. `single`: for requests of one token in the step."""

    conv_tokens: int
    conv_channels: int
    scan_rows: (
        int  # Mamba-2: dims of a head of a state of [rows, 128]; 64 are what the warps keep beside the tiles it meets
    )
    scan_warps: int
    single_scan_rows: int
    single_scan_warps: int
    selective_channels: int  # Mamba
    selective_warps: int
    delta_columns: int  # gated delta rule: value dims
    delta_warps: int
    single_delta_columns: int
    single_delta_warps: int
    chunk: int  # tokens multiplied at once
    float32_chunk: int  # of three products each, whose parts are in shared memory at the same time


@dataclass(frozen=True, slots=True)
class Tuning:
    """All numbers of one device."""

    multiprocessors: int  # read from the device, not from a file
    linear: LinearTuning
    coded: CodedTuning
    attention: AttentionTuning
    experts: ExpertTuning
    sampling: SamplingTuning
    recurrent: RecurrentTuning
