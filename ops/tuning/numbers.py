"""Numbers that are measured on a device and select kernels: meaning, unit, and how each was measured.

The types are here; the values are in *.json in this folder. Numbers that need no measurement are in their kernels. No number
changes a result beyond the order of a sum."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(gt=0)]


class Numbers(Struct, frozen=True, forbid_unknown_fields=True):
    """Group of numbers; a file must contain exactly its fields."""


class PaddedProduct(Numbers, frozen=True):
    """Range of row counts for which cuBLAS is faster with `as_rows` rows, for a weight [out_features, in_features]."""

    out_features: Count
    in_features: Count
    min_rows: Count
    max_rows: Count
    as_rows: Count


class LinearTuning(Numbers, frozen=True):
    """Thresholds that choose the kernel of a linear layer [out_features, in_features] by rows of x. Measured in a captured
    graph over whole layers of the 0.6B, 1.7B and 8B shapes (tests/benches/ops/cuda.py): cuBLAS is slower if its tiles do not
    fill the device, and if it needs a second launch for the activation."""

    max_streamed_rows: Count  # maximum rows for which few_rows.cu is the fastest at every size
    small_weight: Count  # maximum elements of a weight that few_rows.cu computes for all of its row counts
    narrow_out_features: (
        Count  # maximum out features with which cuBLAS leaves the device half empty: tiled.cu computes all its rows
    )
    huge_out_features: Count  # out features, as of a vocabulary's head, from which tiled.cu is faster again
    max_tiled_rows: Count  # maximum rows for it, for gated layers (activation in the same launch) and for small weights
    shallow_in_features: Count  # in features below which cuBLAS is faster for small weights ...
    max_shallow_rows: Count  # ... up to this number of rows
    max_ahead_bytes: Count | None  # bytes of the next weight that kernels of few rows prefetch into L2; None: none
    max_tiled_rows_plus: Count  # maximum rows for which tiled.cu adds adapters at its end, instead of separate kernels
    max_split_blocks: Count  # maximum blocks of tiled.cu for splitting K in two: beyond, a cluster's barriers cost more
    # 448 rows of 8B's gate and up take cuBLAS 267 us, with a tile of 512 x 64, and padded to 464 161; 832 rows of 32B's down 469
    # and 329.
    padded: tuple[PaddedProduct, ...]


class CodedTuning(Numbers, frozen=True):
    """Thresholds of linear layers with weights in codes and scales (gemm/coded.py), measured by tests/benches/ops/coded.py."""

    min_widened_rows: Count  # rows from which a 4-bit weight for Triton is dequantised first ...
    small_weight: Count  # ... and elements up to which it is at any number of rows
    max_streamed_rows: Count  # maximum rows for which few_rows_coded.cu is faster than tiled_w4.cu with 4-bit codes ...
    max_streamed_out_features: Count  # ... with so few out features that those tiles need clusters
    max_tiled_rows: Count  # maximum rows for which tiled_w4.cu is faster than plain numbers
    max_rounded_rows: Count  # maximum rows for which tiled_fp8.cu is faster than cuBLAS ...
    narrow_out_features: Count  # ... and maximum out features with which cuBLAS leaves the device half empty
    max_narrow_rows: Count  # up to this number of rows


class DecodeBlock(Numbers, frozen=True):
    """Block of decode.cu: its warps, and how many such blocks must fit into the registers of a multiprocessor."""

    warps: Count
    num_blocks: Count


class DecodeTuning(Numbers, frozen=True):
    """Numbers of decode.cu, by pairs of request and kv head. Measured with contexts of 576 keys, and with mixed ones of 100
    to 2048 keys, longest first. Wide blocks balance long contexts; narrow ones are faster if pairs fill the device two or
    three times; few pairs get a cluster of blocks each. If pairs fill the device many times, an early start next to a 4-bit
    linear layer is slower (8B, us per layer after qkv, for 256, 512, 1,024 and 2,048 pairs: 22.7, 46.9, 91.6 and 180 with
    early start, 24.0, 45.3, 78.2 and 164 without; the whole layer with 512 pairs is 2 % faster with it)."""

    wide: DecodeBlock
    narrow: DecodeBlock
    narrow_bytes: DecodeBlock  # for 8-bit caches, for at least `min_narrow_pairs` pairs
    head_size_256: DecodeBlock  # for any number of pairs
    min_narrow_pairs: Count  # minimum pairs for narrow blocks
    max_narrow_pairs: Count  # maximum pairs for narrow blocks, of 16-bit caches
    clustered_pairs: Count  # blocks per pair: this divided by the number of pairs, rounded down, at least one
    max_early_pairs: Count  # maximum pairs for which blocks may start before the previous kernel ends
    max_splits: Count  # maximum blocks per pair


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
    """Numbers of paged attention in Triton, by lanes of a head (its size, rounded up to a power of two): 64, 128, 256."""

    prefill: dict[int, QueryTiles]  # 16-bit queries, if tiles fill the device
    small_prefill: dict[int, QueryTiles]  # if `prefill` would leave multiprocessors idle
    float32_prefill: dict[int, QueryTiles]
    decode: dict[int, KeySplits]


class WithinStepTuning(Numbers, frozen=True):
    """Tile sizes of attention within a step under a full mask (triton_packed.py), in 16 bits, if tiles fill the device. Other cases
    use the tiles of paged attention. `full`: by lanes of a head. Example: 64 lanes, 8,192 tokens in texts of 512, 12 heads: 50 us,
    instead of 61 with 128 keys and 8 warps."""

    full: dict[int, QueryTiles]
    biased: QueryTiles  # with a bias by distance, whose float32 tile also needs shared memory; for any number of lanes


class LatentTiles(Numbers, frozen=True):
    """Program of latent attention: `rows` queries times heads, `keys` at a time, at least `min_keys` per split."""

    rows: Count
    keys: Count
    warps: Count
    stages: Count
    min_keys: Count


class LatentTuning(Numbers, frozen=True):
    """Numbers of latent attention in Triton: 16-bit and float32, one query and many."""

    prefill: LatentTiles
    decode: LatentTiles
    float32_prefill: LatentTiles
    float32_decode: LatentTiles


class AttentionTuning(Numbers, frozen=True):
    """Numbers of all attention kernels over the paged cache.

    min_prefill_queries: queries of a row from which prefill.cu, with tiles of 128 queries of one head, is faster than the
    Triton kernel, whose smaller tiles can hold all heads of a group. Measured by tests/benches/ops/prefill.py."""

    min_prefill_queries: Count
    min_widened_queries: Count  # queries of a row from which its fp8 context is converted once before prefill.cu
    max_widened_bytes: Count  # maximum 16-bit bytes that are converted at once
    max_splits: Count  # maximum splits of a context in Triton: more cost more to join than they save
    programs_per_multiprocessor: Count  # target for splitting contexts
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
    """Tile sizes of the mixture of experts in Triton, by ascending `max_pairs`; the last is None. Measured by
    tests/benches/ops/moe.py."""

    half: tuple[ExpertTiles, ...]  # 16-bit weights
    float32: tuple[ExpertTiles, ...]


class SamplingTuning(Numbers, frozen=True):
    """Numbers of sampling in Triton, for rows of logits."""

    pool: Count  # logits that the filtering program of a row keeps in registers
    prepare_programs: Count  # approximate programs of the pass that adjusts all rows: about four per multiprocessor
    tiles: tuple[Count, ...]  # logits per program, descending: the first with `min_programs` programs, or the last
    min_programs: Count  # about two per multiprocessor


class RecurrentTuning(Numbers, frozen=True):
    """Sizes and warps of programs for recurrent layers in Triton. `single`: for requests with one token in the step."""

    conv_tokens: Count
    conv_channels: Count
    scan_rows: Count  # Mamba-2: dims of a head, of a state [rows, 128]; warps can keep 64 besides the tiles
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
    float32_chunk: Count  # of three products each, whose parts are in shared memory together


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
