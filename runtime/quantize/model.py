"""Quantisation of a model's files to a new folder: selects the matrices, quantises them, and writes the files.

Matrices of layers and experts are quantised. The embedding, head, routers and norms are not, nor are matrices whose columns no
group size divides. With calibration texts, GPTQ quantises a few layers at a time; their inputs are computed by the already
quantised layers before them. Experts are quantised without calibration, since they get different tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ops
from runtime.api import LoadProgress
from runtime.config import WeightPolicy
from runtime.models.blocks.weights import expert_halves
from runtime.models.decoder import Decoder
from runtime.models.load import opened, read_weights
from runtime.models.reading import DTYPES, as_torch, planned_loads
from runtime.models.registry import spec_from_config
from runtime.models.spec.decoder import EMBEDDING, HEAD, DecoderSpec
from runtime.models.spec.mlp import MoE
from runtime.quantize.folder import SHARD_BYTES, ModelFolder
from runtime.quantize.gptq import gptq
from runtime.quantize.inputs import WatchedLinear, read_text, watched, watching
from runtime.quantize.schemes import SCHEMES, RoundingScheme, quantization_config, spread
from runtime.weights.fetch import ModelFiles
from runtime.weights.rules import (
    GroupedRows,
    InterleavedHalves,
    InterleavedRope,
    Parameter,
    ReadPlan,
    Report,
    Shard,
    SwappedHalves,
    TensorSource,
    WeightsError,
)

GRAM_BYTES = 2 << 30  # of layers calibrated at the same time
_MIN_ROWS = 16  # quantising a gate of one row loses more than it saves
_BESIDE = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Matrix of the checkpoint that is quantised. `linear`: name of the linear layer that contains it; None for an expert."""

    name: str
    linear: str | None
    group: int


@dataclass(frozen=True, slots=True)
class Quantised:
    """Result of a quantisation. `left`: names of layers that are not quantised. `lost`: relative error of each quantised matrix, by
    name."""

    num_quantised: int
    left: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    lost: Mapping[str, float]
    calibrated: int

    @property
    def facts(self) -> dict[str, Any]:
        mean = sum(self.lost.values()) / max(1, len(self.lost))
        return {
            "num_quantised": self.num_quantised, "num_calibrated": self.calibrated, "left": list(self.left),
            "bytes_before": self.bytes_before, "bytes_after": self.bytes_after, "mean_loss": mean,
        }  # fmt: skip


def quantize(
    files: ModelFiles, out: Path, scheme_name: str, texts: Sequence[Sequence[int]], report: Report,
    shard_bytes: int = SHARD_BYTES, gram_bytes: int = GRAM_BYTES,
) -> Quantised:  # fmt: skip
    """Quantise a model and write it to the new folder `out`. `texts`: token ids of calibration texts; without texts, matrices are
    only rounded. Raises WeightsError, and UnsupportedModel for architectures that our own decoder does not support."""
    scheme, spec = SCHEMES[scheme_name], spec_from_config(files.config)
    with ModelFolder(out, shard_bytes) as folder:
        with files.open_tensors("auto", {}, 0) as source:
            targets = {target.name: target for target in _targets(spec, source, scheme)}
            left = tuple(_left(source, targets))
        if not targets:
            raise WeightsError(f"{files.name}: nothing in it can be quantised as {scheme.name}")
        dtype = _model_dtype(files.config)
        calibrated = _calibrated(files, spec, scheme, targets, texts, DTYPES[dtype], report, gram_bytes)
        lost: dict[str, float] = {}
        with files.open_tensors("auto", {}, 0) as source:
            before = sum(_stored_bytes(source, name) for name in source.shapes)
            for name, values in _numbers(source, targets, dtype, report):
                if name not in targets:
                    folder.add({name: values})
                    continue
                codes, scales = calibrated.get(name) or _alone(scheme, values, DTYPES[dtype])
                worth = codes * spread(scales, values.shape[1])
                lost[name] = float((worth - values).norm() / values.norm().clamp(min=1e-30))
                base = name.removesuffix(".weight")
                made = scheme.tensors(codes, scales, DTYPES[dtype])
                folder.add({f"{base}.{end}": each for end, each in made.items()})
        groups: dict[int, list[str]] = {}
        for target in targets.values():
            groups.setdefault(target.group, []).append(target.name.removesuffix(".weight"))
        config = {key: value for key, value in files.config.items() if key != "quantization_config"}
        section = quantization_config(scheme, groups, list(left))
        folder.write_json("config.json", {"dtype": dtype} | config | {"quantization_config": section})
        if files.generation_config:
            folder.write_json("generation_config.json", files.generation_config)
        if files.kind == "hf":
            folder.copy(_beside(files.path))
        after = folder.nbytes
    return Quantised(len(targets), left, before, after, lost, len(calibrated))


def _targets(spec: DecoderSpec, source: TensorSource, scheme: RoundingScheme) -> Iterator[StoredMatrix]:
    linears = {f"{linear.name}.weight": linear.name for linear in spec.linears() if not linear.float32}
    routers = {
        f"{block.router_linear(layer, spec.hidden_size).name}.weight"
        for layer, block in spec.blocks()
        if isinstance(block, MoE)
    }
    kept, halves = {f"{spec.head.name}.weight", f"{HEAD}.weight", f"{EMBEDDING}.weight"} | routers, expert_halves(spec)
    for load in planned_loads(spec, source):
        name = load.parameter.name
        if name in kept or not (name in linears or name in halves) or not _by_rows(load):
            continue
        for shard in load.shards:
            if shard.index is not None or len(shard.shape) != 2 or shard.shape[0] < _MIN_ROWS:
                continue
            if shard.name.endswith(".weight") and (group := scheme.group(shard.shape[1])) is not None:
                yield StoredMatrix(shard.name, linears.get(name), group)


def _by_rows(load: ReadPlan) -> bool:
    match load.transform:
        case InterleavedHalves(as_columns=as_columns):
            return not as_columns
        case None | InterleavedRope() | GroupedRows() | SwappedHalves():
            return True
    return False


def _left(source: TensorSource, targets: Mapping[str, StoredMatrix]) -> Iterator[str]:
    """Yield the names of layers that are not quantised. The head is always among them, since it may be the embedding."""
    yield "lm_head"
    for name, shape in source.shapes.items():
        layer = name.removesuffix(".weight")
        if (
            len(shape) == 2
            and name not in targets
            and layer != name
            and not layer.endswith(("lm_head", "embed_tokens"))
        ):
            yield layer


def _model_dtype(config: Mapping[str, Any]) -> str:
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return named if named in DTYPES else "bfloat16"


def _numbers(
    source: TensorSource, targets: Mapping[str, StoredMatrix], dtype: str, report: Report
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of every stored tensor, layer by layer. Matrices to quantise are float32, other quantised tensors have
    `dtype`, and plain tensors are unchanged."""
    names = sorted(source.shapes, key=_in_order)
    storage = {name: "float32" if name in targets else _FLOATS.get(source.types[name], dtype) for name in names}
    shapes = {name: source.shapes[name] or (1,) for name in names}
    loads = [ReadPlan(Parameter(name, shapes[name]), (Shard(name, 0, shapes[name]),)) for name in names]
    for parameter, values in source.stream(loads, dtype, report, storage):
        yield parameter.name, as_torch(values).reshape(source.shapes[parameter.name])


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares the numbers in a name as integers: layer 9 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _alone(scheme: RoundingScheme, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = scheme.scales(values, None, dtype)
    return scheme.rounded(values, scales), scales


def _stored_bytes(source: TensorSource, name: str) -> int:
    return (4 if source.types[name] == "F32" else 2) * prod(source.shapes[name])


def _beside(folder: Path) -> Iterator[Path]:
    for pattern in _BESIDE:
        for file in sorted(folder.glob(pattern)):
            if file.name not in ("config.json", "generation_config.json") and ".index." not in file.name:
                yield file


def _calibrated(
    files: ModelFiles, spec: DecoderSpec, scheme: RoundingScheme, targets: Mapping[str, StoredMatrix],
    texts: Sequence[Sequence[int]], dtype: torch.dtype, report: Report, gram_bytes: int,
) -> dict[str, tuple[Tensor, Tensor]]:  # fmt: skip
    if not texts:
        return {}
    policy = WeightPolicy("float32")
    with opened(spec, files, dtype="float32", load_format="auto", seed=0, device="cpu", policy=policy) as reader:
        weights = read_weights(spec, reader, dtype="float32", device="cpu", progress=report)
    names = dict.fromkeys(target.linear for target in targets.values() if target.linear is not None)
    weights, linears = watched(weights, names)
    longest = max(map(len, texts))
    decoder = Decoder.build(spec, weights, dtype="float32", device="cpu", max_positions=longest + 1)
    del weights
    with files.open_tensors("auto", {}, 0) as source:
        loads = {load.parameter.name: load for load in planned_loads(spec, source)}
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for number, some in enumerate(_some_layers(linears, gram_bytes)):
            report(LoadProgress("calibration", number))
            with watching(some):
                for text in texts:
                    read_text(decoder, text)
                for name, linear in some.items():
                    load = loads[f"{name}.weight"]
                    assert linear.gram is not None, "it is watched"
                    found |= _rounded_layer(decoder, source, load, linear.gram, scheme, targets, dtype)
    return found


def _some_layers(linears: Mapping[str, WatchedLinear], gram_bytes: int) -> Iterator[dict[str, WatchedLinear]]:
    """Yield groups of linear layers, by name, whose `gram` matrices fit in `gram_bytes` together. A layer of the model is never
    divided."""
    layers: dict[str, dict[str, WatchedLinear]] = {}
    for name, linear in linears.items():
        found = re.match(r"(.*?\.\d+)\.", name)
        layers.setdefault(name if found is None else found[1], {})[name] = linear
    some: dict[str, WatchedLinear] = {}
    taken = 0
    for layer in layers.values():
        needed = sum(4 * linear.in_features**2 for linear in layer.values())
        if some and taken + needed > gram_bytes:
            yield some
            some, taken = {}, 0
        some |= layer
        taken += needed
    if some:
        yield some


def _rounded_layer(
    decoder: Decoder, source: TensorSource, load: ReadPlan, gram: Tensor, scheme: RoundingScheme,
    targets: Mapping[str, StoredMatrix], dtype: torch.dtype,
) -> dict[str, tuple[Tensor, Tensor]]:  # fmt: skip
    """Return (codes, scales) of the matrices of a linear layer, by name. Replace the layer's weights in `decoder` by the quantised
    ones."""
    found, parts = {}, []
    for shard in load.shards:
        alone = ReadPlan(Parameter(shard.name, shard.shape), (Shard(shard.name, 0, shard.shape),))
        ((_, values),) = source.stream([alone], "float32", lambda progress: None)
        weight = as_torch(values)
        if shard.name in targets:
            codes, scales = found[shard.name] = gptq(scheme, weight, gram, dtype)
            weight = codes * spread(scales, weight.shape[1])
        parts.append(weight)
    if load.transform is None:  # others would have to be reordered
        decoder.load_parameter(load.parameter.name, ops.StoredWeight.dense(torch.cat(parts)))
    return found
