"""Command `python -m loadtests weights`: time and peak host memory of loading a large checkpoint.

A checkpoint of Llama's layout is written from a shape (its config.json), in shards of bfloat16, with as many layers as fit
--gigabytes. Our server loads it twice: with its files outside the page cache, and with what the first run left there.
Options after `--` go to the server."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import struct
import sys
import tempfile
from array import array
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from loadtests import processes
from loadtests.compare import ServerFailed, wait_until_healthy
from loadtests.gpu import machine
from loadtests.processes import CannotStart, ServerProcess
from loadtests.results import new_record
from loadtests.servers import Server

SUMMARY = "write a large checkpoint, load it, and tell seconds and peak host memory"
_SHARD_BYTES = 4 * 10**9
_BLOCK = 1 << 20  # values that are drawn; tensors repeat them

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}

Shape = tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model-shape",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="its config.json has the sizes of the Llama that is written",
    )
    add("--tokenizer", type=Path, required=True, metavar="PATH", help="folder or .gguf file")
    add(
        "--gigabytes",
        type=float,
        default=16.1,
        metavar="GB",
        help="of weights at most: layers are left out (default 16.1)",
    )
    add("--folder", type=Path, metavar="DIR", help="where to write it (default: the folder for temporary files)")
    add("--start-limit", type=float, default=900.0, metavar="S", help="until /health answers 200 (default 900)")
    add("server_options", nargs="*", metavar="-- OPTION", help="for the server: -- --device cpu")


def tensors_of(config: dict[str, Any]) -> dict[str, Shape]:
    """Names and shapes as Llama's checkpoints have them."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kv = size * (config.get("num_key_value_heads") or heads)
    layer: dict[str, Shape] = {
        "input_layernorm": (hidden,), "self_attn.q_proj": (size * heads, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, size * heads),
        "post_attention_layernorm": (hidden,), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = (config["vocab_size"], hidden)
    return tensors


def num_bytes(tensors: dict[str, Shape]) -> int:
    return 2 * sum(map(prod, tensors.values()))


def cut(config: dict[str, Any], max_bytes: float) -> dict[str, Any]:
    """The same with as many layers as fit. Raises ValueError if not one does."""
    while config["num_hidden_layers"] > 0:
        if num_bytes(tensors_of(config)) <= max_bytes:
            return config
        config = config | {"num_hidden_layers": config["num_hidden_layers"] - 1}
    raise ValueError(f"not one layer of that shape fits {max_bytes / 1e9:g} GB")


def write_checkpoint(config: dict[str, Any], folder: Path, shard_bytes: int = _SHARD_BYTES) -> int:
    """config.json, shards and their index; bytes of the shards. On the disk, and out of the page cache, when it returns."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | _LLAMA, indent=1))
    shards = list(_shards(tensors_of(config), shard_bytes))
    draw = random.Random(0)
    floats = array("f", (draw.gauss(0.0, 0.02) for _ in range(_BLOCK)))
    values = memoryview(array("H", (bits >> 16 for bits in memoryview(floats).cast("B").cast("I")))).cast("B")
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (folder / name).open("wb") as file:
            total += _write_shard(file, shard, values)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _shards(tensors: dict[str, Shape], shard_bytes: int) -> Iterator[dict[str, Shape]]:
    shard: dict[str, Shape] = {}
    for name, shape in tensors.items():
        if shard and num_bytes(shard | {name: shape}) > shard_bytes:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def _write_shard(file: BinaryIO, tensors: dict[str, Shape], values: memoryview) -> int:
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    file.write(struct.pack("<Q", len(text)) + text)
    for shape in tensors.values():
        left = 2 * prod(shape)
        while left > 0:
            left -= file.write(values[:left])
    return end


def measure(folder: Path, args: argparse.Namespace, log: Path) -> dict[str, float]:
    """One start of our server. Raises ServerFailed, CannotStart, OSError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "oneloop", "--model", str(folder), "--tokenizer", str(args.tokenizer), "--port", str(port),
        *args.server_options,
    ]  # fmt: skip
    server = Server("oneloop", port=port, command=command, start_limit_s=args.start_limit)
    with ServerProcess(command, log) as process:
        start_s = wait_until_healthy(server, process)
        figures = {"start_s": start_s, "peak_host_gib": processes.peak_resident_mib(process.pid) / 1024}
        figures["idle_host_gib"] = processes.resident_mib(process.pid) / 1024
    if found := re.search(r"weights: ([0-9.]+) s", log.read_text()):
        figures["weights_s"] = float(found[1])
    return {name: round(value, 2) for name, value in figures.items()}


def main(args: argparse.Namespace) -> int:
    """0 when both starts succeeded; 2 when it could not begin."""
    figures: dict[str, float] = {}
    failure = None
    try:
        config = cut(json.loads((args.model_shape / "config.json").read_text()), args.gigabytes * 1e9)
    except (OSError, ValueError, KeyError) as error:
        print(f"loadtests weights: {error}", file=sys.stderr)
        return 2
    try:
        with (
            processes.stop_signals_as_interrupt(),
            tempfile.TemporaryDirectory(prefix="oneloop-weights-", dir=args.folder) as root,
        ):
            model = Path(root) / "model"
            figures["stored_gb"] = round(write_checkpoint(config, model) / 1e9, 2)
            for way in ("cold", "warm"):
                found = measure(model, args, Path(root) / f"{way}.log")
                figures |= {f"{way}.{name}": value for name, value in found.items()}
    except (ServerFailed, CannotStart, OSError) as error:
        failure = str(error)
        print(f"loadtests weights: {failure}", file=sys.stderr)
    for name, value in figures.items():
        print(f"  {name}: {value:g}")
    name = args.model_shape.resolve().name
    layers = config["num_hidden_layers"]
    print("\n" + json.dumps(new_record("weights", name, machine(), figures) | {"layers": layers, "failure": failure}))
    return 1 if failure else 0
