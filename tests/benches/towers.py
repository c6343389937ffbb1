"""A tower's time beside transformers' own, in turns in one process; and the time to the first token of prompts with pictures.

    python -m tests.benches.towers [--device cuda] [--shape qwen gemma mistral] [--engine | --profile]

Shapes with random weights, pictures one and sixteen at a time; medians. Qwen2.5-VL-7B's: pictures of 1024 x 1024 (1,369
tokens). Gemma 3's SigLIP (so400m, 896 x 896, 256 tokens). Mistral Small 3.1's Pixtral (1036 x 1036, 1,369 tokens), whose pictures
transformers is given one by one, since together it would hide them from each other by a mask of 15 GB. On a CPU small shapes, to
see that they run."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from runtime.api import MediaItem, Request, SamplingParams
from runtime.config import EngineConfig
from runtime.models import implementation
from runtime.models.families.qwen2_vl import qwen2_5_vl
from runtime.models.read.hf_config import HfConfig
from runtime.models.through_transformers import tower
from runtime.platform.encoder_graphs import EncoderGraphs
from runtime.start import start_engine
from runtime.weights.fetch import ModelFiles, resolve

LENGTH = 8192
TURNS = 8
IDS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
LARGE = {
    "text_config": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "rope_parameters": {"rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
}  # fmt: skip
SMALL = {
    "text_config": {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "rope_parameters": {"rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"hidden_size": 160, "out_hidden_size": 256, "depth": 4, "num_heads": 4, "intermediate_size": 320,
                      "fullatt_block_indexes": [3]},
}  # fmt: skip


def files_of(config: dict, folder: Path) -> ModelFiles:
    own = transformers.Qwen2_5_VLConfig(**config, **IDS).to_dict()
    own["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(own))
    return resolve(str(folder), None, lambda progress: None, load_format="dummy")


def picture(rng: np.random.Generator, side: int, number: int, first: int = 0) -> MediaItem:
    """`side`: patches of 14, a multiple of four."""
    grid = np.array([[1, side, side]])
    pixels = rng.standard_normal((side * side, 3 * 2 * 14 * 14)).astype(np.float32)
    positions = np.arange(first, first + side * side // 4, dtype=np.int32)
    return MediaItem("image", number.to_bytes(4, "little"), positions, {"pixel_values": pixels, "image_grid_thw": grid})


def median_s(run: Callable[[], object], device: str, times: int) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


TEXT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}  # fmt: skip
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
          "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False}  # fmt: skip
PIXTRAL = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "head_dim": 64,
           "num_attention_heads": 16, "image_size": 1540, "patch_size": 14}  # fmt: skip
FEW = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}


def whole(kind: str, *, large: bool) -> tuple[Any, int, int]:
    """transformers' config, the side of a picture in pixels, and the tokens of one."""
    if kind == "gemma":
        vision = SIGLIP | ({} if large else FEW | {"image_size": 224})
        side = vision["image_size"]
        num = 256 if large else 16
        config: Any = transformers.Gemma3Config(
            text_config=TEXT | {"hidden_size": 2560 if large else 64}, vision_config=vision, mm_tokens_per_image=num
        )
        return config, side, num
    side = 1036 if large else 112
    config = transformers.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "hidden_size": 5120 if large else 64},
        vision_config=PIXTRAL | ({} if large else FEW), spatial_merge_size=2,
    )  # fmt: skip
    return config, side, (side // 28) ** 2


@torch.inference_mode()
def whole_towers(kind: str, device: str, *, profiled: bool) -> None:
    """Of models that take pictures as they are: tower and projector."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    config, side, each = whole(kind, large=device == "cuda")
    own = config.to_dict()
    own["architectures"] = [type(config).__name__.removesuffix("Config") + "ForConditionalGeneration"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(own))
        files = resolve(folder, None, lambda progress: None, load_format="dummy")
    spec = implementation.describe(files.config, "native").encoder
    ours = tower.load(
        spec, files, dtype=dtype, load_format="dummy", seed=0, progress=lambda progress: None, device=device
    )  # fmt: skip
    with torch.device(device):
        theirs = transformers.AutoModelForImageTextToText.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()  # fmt: skip
    sized = {"image_sizes": np.array([[side, side]])} if kind == "mistral" else {}
    rng = np.random.default_rng(0)
    for num in (1, 16):
        pixels = [rng.standard_normal((1, 3, side, side)).astype(np.float32) for _ in range(num)]
        items = [
            MediaItem("image", bytes([index]), np.arange(each, dtype=np.int32), {"pixel_values": one, **sized})
            for index, one in enumerate(pixels)
        ]
        given = [np.concatenate(pixels)] if kind == "gemma" else pixels

        def their_run(given=given) -> object:
            return [
                theirs.get_image_features(
                    pixel_values=torch.from_numpy(one).to(device, getattr(torch, dtype)),
                    **{name: torch.from_numpy(size) for name, size in sized.items()}, return_dict=True,
                )
                for one in given
            ]  # fmt: skip

        compared(f"{kind}, {num} pictures", num * each, device, ours, items, their_run, profiled=profiled)


def compared(
    what: str, num_tokens: int, device: str, ours: Any, items: list[MediaItem], their_run: Callable[[], object], *,
    profiled: bool,
) -> None:  # fmt: skip
    """Print the times of our tower and of `their_run`, in turns, and, on a GPU, of our captured pass."""
    graphs = EncoderGraphs(max_outputs=1 << 30)

    def captured() -> object:
        ours.passes = graphs
        try:
            return ours.encode(items)
        finally:
            ours.passes = None

    ways = {"ours": lambda: ours.encode(items), "transformers": their_run}
    if device == "cuda":
        ways["captured"] = captured
    times: dict[str, list[float]] = {name: [] for name in ways}
    stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
    with stream:
        for turn in range(TURNS):  # in turns; the first of each compiles, and captures
            for name, run in ways.items():
                took = median_s(run, device, 1)
                if turn > 1:
                    times[name].append(took)
    theirs_s = statistics.median(times["transformers"])
    for name, found in times.items():
        each = statistics.median(found)
        rates = f"{num_tokens / each:.0f} tok/s, {theirs_s / each:.2f} x"
        replays = f", {graphs.num_replays} replays" if name == "captured" else ""
        print(f"{what}, {num_tokens} tokens, {name}: {1000 * each:.1f} ms, {rates}{replays}", flush=True)
    if device == "cuda" and profiled:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            ours.encode(items)
            torch.cuda.synchronize()
        rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)[:14]
        for row in rows:
            print(f"  {row.self_device_time_total / 1000:8.2f} ms {row.count:5d} {row.key[:90]}", flush=True)


@torch.inference_mode()
def towers(files: ModelFiles, device: str, side: int, *, profiled: bool) -> None:
    dtype = "bfloat16" if device == "cuda" else "float32"
    spec = qwen2_5_vl(HfConfig(files.config)).encoder
    ours = tower.load(
        spec, files, dtype=dtype, load_format="dummy", seed=0, progress=lambda progress: None, device=device
    )  # fmt: skip
    config = transformers.Qwen2_5_VLConfig.from_dict(dict(files.config)).vision_config
    config._attn_implementation = "sdpa"
    module = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel
    theirs = module._from_config(config).to(device, getattr(torch, dtype)).eval()
    rng = np.random.default_rng(0)
    for num in (1, 16):
        items = [picture(rng, side, number) for number in range(num)]
        pixels = torch.from_numpy(np.concatenate([item.inputs["pixel_values"] for item in items]))
        grids = torch.from_numpy(np.concatenate([item.inputs["image_grid_thw"] for item in items]))

        def their_run(pixels=pixels, grids=grids) -> object:
            return theirs(pixels.to(device, getattr(torch, dtype)), grid_thw=grids.to(device))

        compared(f"{num} pictures", num * side * side // 4, device, ours, items, their_run, profiled=profiled)


async def first_tokens(files: ModelFiles, device: str, side: int) -> None:
    config = EngineConfig(load_format="dummy", device=device, max_model_len=LENGTH, seed=0)
    engine = await start_engine(config, files, lambda progress: None)
    rng = np.random.default_rng(0)
    num_tokens, number = side * side // 4, 100

    async def one(requests: list[Request]) -> list[float]:
        began, first = time.perf_counter(), [0.0] * len(requests)
        async with engine.submit(requests) as stream:
            async for outputs in stream:
                for output in outputs:
                    assert output.error is None, output.error
                    first[output.index] = first[output.index] or time.perf_counter() - began
        return first

    async def decoding(times: list[float], begun: asyncio.Event) -> None:
        """Note when each token of a stream comes, until it is cancelled."""
        params = SamplingParams(LENGTH - 32, temperature=0.0, ignore_eos=True)
        async with engine.submit([Request("stream", [9] * 16, params)]) as stream:
            async for _ in stream:
                times.append(time.perf_counter())
                if len(times) == 40:
                    begun.set()

    params = SamplingParams(8, temperature=0.0, ignore_eos=True)

    def seeing(num: int) -> list[Request]:
        nonlocal number
        requests = []
        for index in range(num):
            number += 1
            ids = [9] * 8 + [5] * num_tokens + [9] * 8
            requests.append(Request(str(index), ids, params, media=(picture(rng, side, number, 8),)))
        return requests

    for num in (1, 1, 16, 16):
        first = await one(seeing(num))
        print(
            f"{num} at once, alone: TTFT p50 {1000 * statistics.median(first):.0f} ms, last {1000 * max(first):.0f}",
            flush=True,
        )
    for num in (1, 1, 1, 16, 16):
        requests = seeing(num)
        times: list[float] = []
        begun = asyncio.Event()
        stream = asyncio.create_task(decoding(times, begun))
        await begun.wait()
        began = time.perf_counter()
        first = await one(requests)
        stream.cancel()
        await asyncio.wait({stream})
        gaps = [(after, 1000 * (after - before)) for before, after in pairwise(times)]
        alone, beside = ([gap for at, gap in gaps[10:] if (at < began) is wanted] for wanted in (True, False))
        print(
            f"{num} at once: TTFT p50 {1000 * statistics.median(first):.0f} ms, last {1000 * max(first):.0f}; a stream beside: "
            f"{statistics.median(alone):.1f} ms a token without, then {statistics.median(beside):.1f}, longest {max(beside):.0f}",
            flush=True,
        )
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--shape", nargs="+", default=["qwen", "gemma", "mistral"], choices=["qwen", "gemma", "mistral"]
    )
    parser.add_argument("--engine", action="store_true", help="prompts, not towers alone")
    parser.add_argument("--profile", action="store_true", help="what kernels a pass of ours is made of")
    args = parser.parse_args()
    large = args.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        files = files_of(LARGE if large else SMALL, Path(folder))
        side = 74 if large else 16
        if args.engine:
            asyncio.run(first_tokens(files, args.device, side))
            return
        for kind in args.shape:
            if kind == "qwen":
                towers(files, args.device, side, profiled=args.profile)
            else:
                whole_towers(kind, args.device, profiled=args.profile)


if __name__ == "__main__":
    main()
