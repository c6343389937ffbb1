"""Reader of a PEFT folder (adapter_config.json and adapter_model.safetensors): returns the matrices by layer.

The folder is untrusted. Before the adapter is used, module names, shapes, ranks, NaN and infinity are checked against the
model. An error names the tensor and affects this adapter only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ops.lora.share import LoraPart
from runtime.lora.peft_config import CONFIG, PeftConfig
from runtime.lora.targets import LoRATarget, Targets, find, find_embedding, find_stacks
from runtime.models.spec.decoder import EMBEDDING, HEAD
from runtime.weights.dtypes import Array, undo
from runtime.weights.rules import InterleavedHalves, Shape, Transform, WeightsError, shape_text
from runtime.weights.safetensors_file import SafetensorsCheckpoint

WEIGHTS = "adapter_model.safetensors"
_BASE = "base_model.model."
_WRAPPED = ".base_layer"
_COPY = f"{_WRAPPED}.weight"
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_OF_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<half>[AB])(?:\.default)?")
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_REFUSED = {
    "lora_magnitude_vector": "DoRA is not served",
    "modules_to_save": "whole modules beside the adapter are not served",
    ".bias": "biases are not served",
}


class Fingerprint(NamedTuple):
    """Inode numbers, sizes and modification times of a folder's files, to detect later changes."""

    files: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, folder: Path) -> Fingerprint:
        """Return the fingerprint of a folder. Raises WeightsError if a file is missing."""
        try:
            stats = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
        except OSError as error:
            raise WeightsError(f"{folder}: {error.strerror}: {Path(error.filename).name}{_pickled(folder)}") from error
        return cls(tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats))


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Weights of an adapter. `parts`: its A and B matrices, by layer name."""

    parts: Mapping[str, tuple[LoraPart, ...]]
    config: PeftConfig
    max_rank: int
    num_parameters: int

    @property
    def nbytes(self) -> int:
        return sum(part.a.nbytes + part.b.nbytes for parts in self.parts.values() for part in parts)


def read_adapter(folder: Path, targets: Targets, max_rank: int) -> AdapterWeights:
    """Read and check the adapter in `folder`. Raises WeightsError, which names the problem and the tensor."""
    Fingerprint.of(folder)
    config = PeftConfig.read(folder)
    files = SafetensorsCheckpoint(folder, (), single=WEIGHTS)
    try:
        return _read(folder, files, config, targets, max_rank)
    finally:
        files.close()


def _read(
    folder: Path, files: SafetensorsCheckpoint, config: PeftConfig, targets: Targets, max_rank: int
) -> AdapterWeights:
    pairs: dict[str, dict[str, str]] = {}
    for name in files.shapes:
        module, half = _parse(folder, name)
        pairs.setdefault(module, {})[half] = name
    if not pairs:
        raise WeightsError(f"{folder}: the adapter has no tensors")
    parts: dict[str, list[LoraPart]] = {}
    largest = numbers = 0
    for module, halves in pairs.items():
        _check_copy(folder, files, module, halves.pop(_COPY, None), targets)
        if missing := {"A", "B"} - halves.keys():
            raise WeightsError(f"{folder}: {module} has no lora_{missing.pop()}")
        for target, part in _parts(folder, files, config, module, halves, targets, max_rank):
            others = parts.setdefault(target.linear.name, [])
            if any(each.start < part.start + target.rows and part.start < each.start + len(each.b) for each in others):
                raise WeightsError(f"{folder}: {module} is adapted twice")
            others.append(part)
            largest, numbers = max(largest, part.rank), numbers + part.a.numel() + part.b.numel()
    in_order = {name: tuple(sorted(some, key=lambda part: part.start)) for name, some in parts.items()}
    return AdapterWeights(in_order, config, largest, numbers)


def module_of(folder: Path, name: str) -> str:
    """Return the name of the module to which tensor `name` belongs. Raises WeightsError for an unknown form of name."""
    return _parse(folder, name)[0]


def _parse(folder: Path, name: str) -> tuple[str, str]:
    for what, why in _REFUSED.items():
        if what in name:
            raise WeightsError(f"{folder}: tensor {name}: {why}")
    if name.endswith(_COPY):
        return name.removesuffix(_COPY).removeprefix(_BASE), _COPY
    match = _TENSOR.fullmatch(name) or _OF_EMBEDDING.fullmatch(name)
    if match is None:
        raise WeightsError(f"{folder}: tensor {name} is not a tensor of a PEFT LoRA adapter")
    return match["module"].removeprefix(_BASE), match["half"]


def _check_copy(folder: Path, files: SafetensorsCheckpoint, module: str, name: str | None, targets: Targets) -> None:
    """Check tensor `name`, a copy of the base's embedding or head in some adapters. It is ignored, but must have its shape."""
    if name is None:
        return
    target = find_embedding(targets, module) or find(targets, module)
    if target is None and not targets.embeddings:
        return  # the caller reports that embeddings are not supported
    if target is None or target.linear.name not in (EMBEDDING, HEAD):
        raise WeightsError(f"{folder}: tensor {name}: modules_to_save are not supported")
    size = target.linear.out_features, target.linear.in_features
    shape = size if target.linear.name == HEAD else size[::-1]
    if files.shapes[name] != shape:
        raise WeightsError(
            f"{folder}: tensor {name} is {shape_text(files.shapes[name])} instead of the base's {shape_text(shape)}: another "
            "vocabulary is not served"
        )


def _parts(
    folder: Path, files: SafetensorsCheckpoint, config: PeftConfig, module: str, halves: Mapping[str, str],
    targets: Targets, max_rank: int,
) -> Iterator[tuple[LoRATarget, LoraPart]]:  # fmt: skip
    """Yield (layer, matrices) for each layer that a module's A and B change: one layer, or one for every expert."""
    target = find(targets, module)
    if ".lora_embedding_" in halves["A"]:
        target = find_embedding(targets, module)
        if target is None:
            why = "" if targets.embeddings else " that adapters may change here: on a GPU --lora-vocabulary makes room"
            raise WeightsError(f"{folder}: {module} is not a token embedding of this model{why}")
    if target is not None:
        rank, scale = _rank(folder, config, module, max_rank), config.scale_of(module)
        a = _tensor(folder, files, halves["A"], (rank, target.linear.in_features))
        b = _tensor(folder, files, halves["B"], (target.rows, rank))
        yield target, _part(folder, module, target, a, b, scale)
        return
    # PEFT wraps a module once per adapted parameter of it; only the shapes show which parameter it is.
    wrapped = module
    while wrapped.endswith(_WRAPPED):
        wrapped = wrapped.removesuffix(_WRAPPED)
    stacks = find_stacks(targets, wrapped)
    sizes = files.shapes[halves["A"]][1:], files.shapes[halves["B"]][:1]
    stack = next((s for s in stacks if sizes == ((s.targets[0].linear.in_features,), (s.targets[0].rows,))), None)
    if stack is None:
        if stacks:
            raise WeightsError(
                f"{folder}: {module} has shapes that match none of {', '.join(s.parameter for s in stacks)}"
            )
        if "experts" in module.split("."):
            raise WeightsError(
                f"{folder}: {module}: adapters of experts are not supported here; on a GPU --lora-experts enables them"
            )
        why = "" if targets.embeddings else ", nor its head, whose adapters on a GPU --lora-vocabulary enables"
        raise WeightsError(f"{folder}: {module} is not a linear layer of this model{why}")
    named, count, first = f"{wrapped}.{stack.parameter}", len(stack.targets), stack.targets[0]
    rank, scale = _rank(folder, config, named, max_rank), config.scale_of(named)
    a = _tensor(folder, files, halves["A"], (count * rank, first.linear.in_features))
    b = _tensor(folder, files, halves["B"], (first.rows, rank * count))  # ordered by rank, then by expert
    for number, each in enumerate(stack.targets):
        own = a[number * rank : (number + 1) * rank], np.ascontiguousarray(b[:, number::count])
        yield each, _part(folder, module, each, *own, scale)


def _rank(folder: Path, config: PeftConfig, module: str, max_rank: int) -> int:
    rank = config.rank_of(module)
    if rank > max_rank:
        raise WeightsError(f"{folder}: {module} has rank {rank}, more than --max-lora-rank {max_rank}")
    return rank


def _part(folder: Path, module: str, target: LoRATarget, a: Array, b: Array, scale: float) -> LoraPart:
    if target.transform is not None:
        order = _our_order(target.transform, target)
        if order is None:
            raise WeightsError(f"{folder}: {module} has reordered columns, which adapters do not support")
        b = np.ascontiguousarray(b[order])
    return LoraPart(target.start, _as_torch(a), _as_torch(b), scale)


def _our_order(transform: Transform, target: LoRATarget) -> Array | None:
    """Return, for each row of the decoder's layer, its row in checkpoints. Return None if the transform mixes rows of different
    projections."""
    if isinstance(transform, InterleavedHalves):
        transform = InterleavedHalves()  # B's rows are outputs, independent of the weight's orientation
    num_rows = target.linear.out_features
    numbers = np.arange(num_rows, dtype=np.float64)[:, None]
    stored = undo(transform, numbers, (num_rows, 1))[:, 0].astype(
        np.int64
    )  # position of each of our rows in checkpoints
    own = stored[target.start : target.start + target.rows] - target.start
    if own.min() < 0 or own.max() >= target.rows:
        return None
    return own


def _tensor(folder: Path, files: SafetensorsCheckpoint, name: str, shape: Shape) -> Array:
    stored, kind = files.shapes[name], files.types[name]
    if kind not in _DTYPES:
        raise WeightsError(f"{folder}: tensor {name} is {kind}, not one of {', '.join(_DTYPES)}")
    if stored != shape:
        raise WeightsError(f"{folder}: tensor {name} is {shape_text(stored)} instead of {shape_text(shape)}")
    values = np.empty(shape, _DTYPES[kind])
    files.read_rows(name, 0, values)
    if not torch.isfinite(_as_torch(values)).all():
        raise WeightsError(f"{folder}: tensor {name} holds numbers that are not finite")
    return values


def _as_torch(values: Array) -> torch.Tensor:
    """Convert to torch. 16-bit integers are reinterpreted as bfloat16."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _pickled(folder: Path) -> str:
    if os.path.exists(folder / "adapter_model.bin"):
        return "; adapter_model.bin is a pickle, which is never loaded: convert it to safetensors"
    return ""
