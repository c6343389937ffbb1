"""The numbers of devices: the file that a device gets, mistakes in a file, and what an H200's numbers choose.

The choices were written down while the numbers were still constants in code: they are what was measured to be quickest."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from ops import tuning
from ops.attention import cuda as decode
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.gemm import cuda as linear
from ops.gemm import few_rows, tiled, tiled_plus
from ops.tuning import files
from ops.tuning.files import FOLDER, parse
from ops.tuning.numbers import DecodeBlock, ExpertTiles, LatentTiles, ProductTiles, QueryTiles

ROOT = Path(__file__).parents[2]
H200 = tuning.for_device("NVIDIA H200", 132)


# --- which file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100", "NVIDIA H100 80GB HBM3"])
def test_a_known_device_has_its_own_file(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert tuning.for_device(name, 132).multiprocessors == 132
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "multiprocessors"),
    [("NVIDIA L40S", 142), ("NVIDIA H100 PCIe", 114), ("NVIDIA H200 MIG 3g.71gb", 60), ("NVIDIA H2000", 132)],
)
def test_an_unknown_device_or_a_part_of_one_gets_the_default_and_says_so(
    name: str, multiprocessors: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "oneloop.ops")
    assert tuning.for_device(name, multiprocessors).multiprocessors == multiprocessors
    (said,) = (record.message for record in caplog.records)
    assert said == f"no tuning for {name} with {multiprocessors} multiprocessors: using default.json"


def test_what_is_no_cuda_device_is_as_small_as_an_interpreter_wants() -> None:
    assert tuning.of(torch.device("cpu")).multiprocessors == 4


@pytest.mark.gpu
def test_a_gpu_is_asked_for_its_name_and_size() -> None:
    properties = torch.cuda.get_device_properties(0)
    by = tuning.of(torch.device("cuda"))
    assert by.multiprocessors == properties.multi_processor_count
    assert by == tuning.for_device(properties.name, properties.multi_processor_count)


# --- the files -----------------------------------------------------------------------------------------------------------


def test_every_file_is_read_and_says_what_was_measured() -> None:
    assert {file.name for file in files.all_files()} == {path.stem for path in FOLDER.glob("*.json")}
    for file in files.all_files():
        assert file.measured
        assert file.not_measured


def test_no_two_files_are_for_the_same_device() -> None:
    for file in files.all_files():
        for name in file.devices:
            assert [other.name for other in files.all_files() if other.is_for(name, file.multiprocessors or 0)] == [
                file.name
            ]


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (["linear", "small_weight"], "much", "Expected `int`, got `str` - at `$.linear.small_weight`"),
        (["linear", "small_weight"], 1.5, "Expected `int`, got `float` - at `$.linear.small_weight`"),
        (["linear", "small_weight"], True, "Expected `int`, got `bool` - at `$.linear.small_weight`"),
        (["linear", "small_weight"], 0, "Expected `int` >= 1 - at `$.linear.small_weight`"),
        (["linear", "smal_weight"], 1, "Object contains unknown field `smal_weight` - at `$.linear`"),
        (["sampling", "tiles", 1], "x", "Expected `int`, got `str` - at `$.sampling.tiles[1]`"),
        (
            ["attention", "paged", "prefill"],
            {"wide": {}},
            "Expected `int`, got `str` - at `key` in `$.attention.paged.prefill`",
        ),
        (
            ["attention", "paged", "prefill", "64"],
            3,
            "Expected `object`, got `int` - at `$.attention.paged.prefill[...]`",
        ),
        (["attention", "paged", "prefill", "64"], {"rows": 1}, "Object missing required field `keys`"),
        (["experts", "half", 0, "max_pairs"], -1, "Expected `float` > 0.0 - at `$.experts.half[0].max_pairs`"),
        (["devices"], "NVIDIA H200", "Expected `array`, got `str` - at `$.devices`"),
        (["speed"], 1, "Object contains unknown field `speed`"),
    ],
)
def test_a_mistake_in_a_file_is_named(path: list, value: object, complaint: str) -> None:
    content = json.loads((FOLDER / "nvidia-h200.json").read_text())
    at = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ValueError, match=re.escape(f"made-up.json: {complaint}")):
        parse("made-up", content)


def test_what_a_file_leaves_out_is_named_unless_it_is_like_another() -> None:
    content = {"devices": [], "multiprocessors": None, "measured": "nothing", "not_measured": "all"}
    with pytest.raises(ValueError, match=r"made-up.json: Object missing required field `linear`"):
        parse("made-up", content)
    own = msgspec.structs.asdict(H200.sampling) | {"pool": 4096, "tiles": [1024]}
    made = parse("made-up", content | {"like": "nvidia-h200", "sampling": own})
    assert (made.sampling.pool, made.sampling.tiles, made.linear) == (4096, (1024,), H200.linear)


# --- what the H200's numbers choose --------------------------------------------------------------------------------------

ROWS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129)
# in and out features, gated: for each of ROWS whether the weight is streamed, tiled, or cuBLAS's
LINEAR = {
    (1024, 3072, False): "SSSS--TT---",
    (1024, 3072, True): "SSSSTTTT---",
    (1024, 2048, False): "SSSS--TTTT-",
    (1024, 2048, True): "SSSSTTTT---",
    (2048, 2048, False): "SSSSTTTTTT-",
    (2048, 2049, False): "SSSSTTTT---",
    (4096, 4096, False): "SSSSTTTT---",
    (4096, 4096, True): "SSSSTTTT---",
    (4096, 6144, False): "SS---------",
    (4096, 6144, True): "SSTTTTTT---",
    (4096, 24576, True): "SSTTTTTT---",
    (4096, 65536, False): "SSTTTTTT---",
    (4096, 151936, False): "SSTTTTTT---",
    (12288, 2048, False): "SSTTTTTTTT-",
    (12288, 4096, False): "SS---------",
    (2047, 4096, False): "SSSS--TT---",
    (2047, 4096, True): "SSSSTTTT---",
}


@pytest.mark.parametrize(("shape", "kernels"), LINEAR.items())
def test_linear_layers(shape: tuple[int, int, bool], kernels: str) -> None:
    in_features, out_features, gated = shape

    def kernel(num_rows: int) -> str:
        if num_rows <= linear.max_streamed_rows(in_features, out_features, H200.linear):
            return "S"
        return "T" if linear.tiled_wins(num_rows, in_features, out_features, gated, H200.linear) else "-"

    assert "".join(map(kernel, ROWS)) == kernels


@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features", "as_rows"),
    [(432, 28672, 4096, 432), (433, 28672, 4096, 464), (448, 28672, 4096, 464), (449, 28672, 4096, 449), (448, 6144, 4096, 448),
     (832, 5120, 17408, 896), (831, 5120, 17408, 831), (832, 4096, 17408, 832)],
)  # fmt: skip
def test_rows_that_cublas_computes_sooner_as_more(
    num_rows: int, out_features: int, in_features: int, as_rows: int
) -> None:
    assert linear.padded_rows(num_rows, in_features, out_features, H200.linear) == as_rows


@pytest.mark.parametrize("as_rows", [5, 8])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_computed_as_of_more_rows_is_the_same(as_rows: int, has_bias: bool) -> None:
    x, weight = torch.randn(5, 16), torch.randn(12, 16)
    bias = torch.randn(12) if has_bias else None
    out = linear.padded_product(x, weight, bias, as_rows)
    assert out.is_contiguous()
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features", "warps", "batches", "tiles"),
    [
        (1, 1024, 2096, 16, 1, 1), (1, 1024, 2112, 8, 1, 1), (8, 4096, 4096, 8, 2, 1), (9, 256, 1024, 16, 1, 2),
        (9, 512, 4096, 8, 1, 2), (16, 4096, 4096, 8, 2, 2),
    ],
)  # fmt: skip
def test_streams(num_rows: int, in_features: int, out_features: int, warps: int, batches: int, tiles: int) -> None:
    chosen = few_rows.choose(num_rows, in_features, out_features, False, H200.multiprocessors)
    assert chosen == few_rows.Variant(warps, batches, tiles, False)


@pytest.mark.parametrize(
    ("num_rows", "num_blocks", "rows", "stages"),
    [(1, 132, 32, 10), (32, 133, 32, 5), (33, 132, 64, 8), (64, 1000, 64, 4), (65, 8, 128, 6), (128, 133, 128, 3)],
)
def test_tiles_of_a_weight(num_rows: int, num_blocks: int, rows: int, stages: int) -> None:
    assert tiled.choose(num_rows, num_blocks, False, H200.multiprocessors) == tiled.Tile(rows, stages, False)


@pytest.mark.parametrize(
    ("in_features", "out_features", "splits"),
    [(1024, 1024, 4), (2048, 2048, 4), (4096, 2048, 4), (4096, 4096, 2), (4096, 6144, 2), (4096, 12800, 1), (256, 128, 1),
     (512, 128, 2), (2048, 128, 8)],
)  # fmt: skip
def test_splits_of_a_weight(in_features: int, out_features: int, splits: int) -> None:
    assert tiled.choose_splits(in_features, out_features, H200.linear.max_split_blocks) == splits


@pytest.mark.parametrize(("num_rows", "wins"), [(8, False), (9, True), (32, True), (33, False), (512, False)])
def test_rows_whose_products_add_adapters_where_they_end(num_rows: int, wins: bool) -> None:
    assert linear.tiled_plus_wins(num_rows, H200.linear) == wins


@pytest.mark.parametrize(
    ("parts", "gated", "fits"),
    [((4096, 1024, 1024), False, True), ((4096,), False, True), ((4096, 64), False, False), ((14336, 14336), True, True),
     ((64, 64), True, True), ((32, 32), True, False), ((128, 64), True, False), ((128,), True, False)],
)  # fmt: skip
def test_parts_whose_adapters_a_product_adds_where_it_ends(parts: tuple[int, ...], gated: bool, fits: bool) -> None:
    assert tiled_plus.fits(parts, 16, gated=gated) == fits
    assert not tiled_plus.fits(parts, 64, gated=gated)


@pytest.mark.parametrize(
    ("pairs", "warps", "num_blocks", "splits"),
    [(1, 8, 2, 8), (25, 8, 2, 8), (66, 8, 2, 3), (67, 8, 2, 2), (100, 8, 2, 2), (101, 8, 2, 1), (999, 8, 2, 1), (1000, 4, 4, 1),
     (1599, 4, 4, 1), (1600, 8, 2, 1)],
)  # fmt: skip
def test_blocks_of_decode(pairs: int, warps: int, num_blocks: int, splits: int) -> None:
    by = H200.attention.decode
    assert decode.choose(pairs, 128, by) == (DecodeBlock(warps, num_blocks), splits)
    assert decode.choose(pairs, 256, by) == (DecodeBlock(4, 2), splits)
    narrow = DecodeBlock(2, 8) if pairs >= by.min_narrow_pairs else DecodeBlock(8, 2)
    assert decode.choose(pairs, 128, by, eight_bits=True) == (narrow, splits)


@pytest.mark.parametrize(("num_requests", "early"), [(1, True), (64, True), (65, False), (256, False)])
def test_blocks_of_decode_start_early_where_they_are_few(
    num_requests: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[dict[str, object]] = []

    class Kernel:
        def launch(self, *_: object, **how: object) -> None:
            launches.append(how)

    monkeypatch.setattr(decode, "_kernel", lambda *_: Kernel())
    qkv, cache = (
        torch.zeros(num_requests, 48 * 128, dtype=torch.bfloat16),
        torch.zeros(1, 8, 16, 128, dtype=torch.bfloat16),
    )
    heads = AttentionHeads(32, 8, 128, 1.0, torch.zeros(1, 128))
    ones = torch.ones(num_requests, dtype=torch.int32)
    meta = AttentionMeta(torch.arange(num_requests + 1), ones, torch.zeros(num_requests, 1), 1, 1, uniform=True)
    decode.decode(qkv, heads, cache, cache, meta, torch.empty(num_requests, 32, 128), fused=True)
    assert launches[0]["early"] == early


def test_every_block_that_decode_may_choose_is_compiled() -> None:
    compiled = decode.program_of(torch.device("cpu")).instances
    assert sorted(compiled) == sorted(
        f"decode_{size}_{blocks}"
        for size, each in {64: ("8_2", "4_4"), 96: ("8_2", "4_4"), 128: ("8_2", "4_4"), 256: ("4_2",)}.items()
        for blocks in each
    )
    of_bytes = decode.program_of(torch.device("cpu"), "u8").instances
    assert {"decode_128_8_2", "decode_128_2_8", "decode_256_4_2"} < of_bytes.keys()
    assert compiled["decode_96_4_4"] == "DECODE(decode_96_4_4, 96, 4, 4, u16)"


@pytest.mark.parametrize(
    ("lanes", "num_tokens", "tiles"),
    [
        (64, 527, (64, 64, 4, 3, False)), (64, 528, (128, 128, 8, 3, False)), (128, 527, (64, 64, 4, 3, False)),
        (128, 528, (128, 64, 8, 3, True)), (256, 527, (64, 32, 4, 3, False)), (256, 528, (128, 64, 8, 2, False)),
    ],
)  # fmt: skip
def test_tiles_of_prompts(lanes: int, num_tokens: int, tiles: tuple[int, int, int, int, bool]) -> None:
    paged = pytest.importorskip("ops.attention.triton_paged", reason="needs Triton")
    by = H200.attention.paged
    assert paged.choose_tiles(torch.bfloat16, lanes, num_tokens * 32, by, 132) == QueryTiles(*tiles)
    float32 = paged.choose_tiles(torch.float32, lanes, num_tokens * 32, by, 132)
    assert float32 == (QueryTiles(16, 16, 4, 2, False) if lanes == 256 else QueryTiles(32, 32, 4, 2, False))


@pytest.mark.parametrize(
    ("num_programs", "max_context", "min_keys", "splits"),
    [(1, 100, 128, 1), (1, 40960, 128, 32), (8, 40960, 128, 32), (64, 2048, 128, 4), (132, 2048, 128, 2), (133, 2048, 128, 1),
     (4, 4096, 256, 16)],
)  # fmt: skip
def test_splits_of_a_context(num_programs: int, max_context: int, min_keys: int, splits: int) -> None:
    walk = pytest.importorskip("ops.attention.triton_paged", reason="needs Triton")
    assert walk.num_splits_for(num_programs, max_context, min_keys, H200) == splits


def test_other_tiles_of_attention() -> None:
    by = H200.attention
    assert {lanes: msgspec.structs.astuple(how) for lanes, how in by.paged.decode.items()} == {
        64: (64, 4, 3, 128), 128: (64, 4, 3, 128), 256: (32, 4, 3, 128),
    }  # fmt: skip
    assert (by.latent.decode, by.latent.prefill) == (LatentTiles(16, 32, 4, 3, 256), LatentTiles(64, 32, 8, 2, 256))
    assert by.latent.float32_decode == by.latent.float32_prefill == LatentTiles(16, 16, 4, 2, 256)
    assert by.min_prefill_queries == 64


def test_experts() -> None:
    def tiles(max_pairs: float | None, gate_up: tuple[int, ...], down: tuple[int, ...]) -> ExpertTiles:
        return ExpertTiles(max_pairs, ProductTiles(*gate_up), ProductTiles(*down))

    assert H200.experts.half == (
        tiles(12, (16, 64, 128, 4, 5), (16, 64, 128, 4, 3)),
        tiles(32, (32, 128, 128, 4, 4), (32, 128, 64, 4, 4)),
        tiles(64, (64, 64, 64, 4, 4), (64, 128, 64, 4, 4)),
        tiles(256, (128, 128, 64, 8, 4), (128, 256, 64, 8, 4)),
        tiles(None, (128, 128, 64, 8, 3), (128, 256, 64, 8, 3)),
    )
    assert H200.experts.float32 == (
        tiles(24, (16, 32, 32, 4, 2), (16, 32, 32, 4, 2)),
        tiles(None, (64, 32, 32, 4, 2), (64, 64, 32, 4, 2)),
    )


@pytest.mark.parametrize("file", files.all_files(), ids=lambda file: file.name)
def test_tiles_of_experts_rise_and_end_open(file: files.TuningFile) -> None:
    for tiles in (file.experts.half, file.experts.float32):
        *bounds, last = [each.max_pairs for each in tiles]
        assert bounds == sorted(bounds)
        assert last is None


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "tile"),
    [(1, 151936, 1024), (3, 151936, 1024), (4, 151936, 2048), (6, 151936, 2048), (7, 151936, 4096), (8, 32000, 1024),
     (16, 32000, 2048), (32, 32000, 4096), (256, 1000, 4096)],
)  # fmt: skip
def test_tiles_of_logits(num_rows: int, vocab_size: int, tile: int) -> None:
    sampling = pytest.importorskip("ops.sampling.triton_sample", reason="needs Triton")
    assert sampling.choose_tile(num_rows, vocab_size, H200.sampling) == tile
    assert (H200.sampling.pool, H200.sampling.prepare_programs) == (8192, 512)


def test_recurrent_layers() -> None:
    assert msgspec.structs.asdict(H200.recurrent) == {
        "conv_tokens": 16, "conv_channels": 128, "scan_rows": 64, "scan_warps": 8, "single_scan_rows": 16,
        "single_scan_warps": 2, "selective_channels": 32, "selective_warps": 2, "delta_columns": 32, "delta_warps": 8,
        "single_delta_columns": 16, "single_delta_warps": 2, "chunk": 64, "float32_chunk": 16,
    }  # fmt: skip


def test_neither_files_nor_their_types_are_loaded_until_a_device_is_asked_about() -> None:
    code = "import sys, ops; assert not {'ops.tuning.files', 'ops.tuning.numbers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
