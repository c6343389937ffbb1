"""Reader of a checkpoint's tensors as parameters of a decoder. Parameters are read one by one, each in its target format.

All names and shapes are checked before any data is read. This module handles formats and names; kernels prepare the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Set
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import ops
from runtime.config import WeightPolicy
from runtime.models.kv_scales import KV_SCALES, kv_scale_loads
from runtime.models.spec.decoder import EMBEDDING, HEAD, DecoderSpec
from runtime.models.spec.mlp import MoE
from runtime.models.spec.sharding import cuts
from runtime.models.uploads import Uploads
from runtime.weights.rules import (
    AS_STORED,
    Destination,
    Parameter,
    ReadPlan,
    Report,
    Span,
    StoredRows,
    TensorSource,
    WeightsError,
    fitting,
    moves_rows,
    plan,
    reduced,
)

NARROW = {"BF16": "bfloat16", "F16": "float16"}
_PLAIN = frozenset({"F32", *NARROW})
# Formats with the same bits, by `WeightPolicy.online`: quantising them again would only lose precision.
_ALREADY: Mapping[str | None, Set[str]] = {"int8": {"Q8_0", "w8"}, "int16": set(), "fp8": {"fp8"}, "w4": {"w4"}}

Refusal = Callable[[frozenset[str]], str | None]


_BLOCK = 256  # columns; a multiple of every format's block size


def _whole_blocks(columns: Span | None) -> bool:
    return columns is None or not (columns.start % _BLOCK or columns.stop % _BLOCK)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Choice of the storage format of each matrix. `policy`: requested policy. `dtype`: dtype of activations. `types`: dtypes of
    the checkpoint's tensors. `rounded`: names of the parameters that are quantised while loading."""

    policy: WeightPolicy
    dtype: str
    types: Mapping[str, str]
    rounded: Collection[str] = ()

    def storage(self, load: ReadPlan, refusal: Refusal) -> str:
        """Return the dtype in which a matrix is stored, or AS_STORED for the checkpoint's format. `refusal`: returns why no kernel
        supports rows in these formats, or None."""
        types = self._types(load)
        if self._stays(load) and refusal(types) is None:
            return AS_STORED
        if self.policy.dense_dtype != "stored":
            return self.policy.dense_dtype
        narrow = {NARROW.get(each, self.dtype) for each in types}
        return narrow.pop() if len(narrow) == 1 and refusal(frozenset(narrow)) is None else self.dtype

    def widened(self, load: ReadPlan, refusal: Refusal) -> str | None:
        """Return a warning if quantised rows are dequantised although the policy keeps them quantised; otherwise None."""
        if not self.policy.keep_quantized or self._types(load) <= _PLAIN or self.storage(load, refusal) == AS_STORED:
            return None
        types = ", ".join(sorted(self._types(load)))
        if load.parameter.name in self.rounded:
            return f"weights in {types} are decoded, and rounded to {self.policy.online}"
        why = (
            refusal(self._types(load))
            if self._stays(load)
            else "what is wanted of them is not whole blocks in their order"
        )
        return f"weights in {types} become {self.storage(load, refusal)}: {why}"

    def _types(self, load: ReadPlan) -> frozenset[str]:
        return frozenset(self.types[shard.name] for shard in load.shards)

    def _stays(self, load: ReadPlan) -> bool:
        whole_rows = load.transform is None or (moves_rows(load.transform) and len(load.shards) == 1)
        whole_rows = whole_rows and load.cut is None and all(_whole_blocks(shard.columns) for shard in load.shards)
        return whole_rows and self._may_stay(load) and not self._types(load) & _PLAIN

    def _may_stay(self, load: ReadPlan) -> bool:
        """Return whether quantised rows should stay as stored. Matrices to be quantised online stay only if they have the
        target format already."""
        if load.parameter.name in self.rounded and not self._types(load) <= _ALREADY[self.policy.online]:
            return False
        return self.policy.keep_quantized


log = logging.getLogger("oneloop.start")

TABLE = f"{EMBEDDING}.weight"
_BY_DEVICE = {"fp8": ops.round_to_fp8, "w4": ops.round_to_w4}  # quantisation on a device
_BY_KERNELS = {"int8": ops.StoredWeight.int8, "int16": ops.StoredWeight.int16}  # quantisation by the CPU's packing
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ParameterReader:
    """Reader of the parameters of `spec` from the checkpoint `source`. `dtype`: dtype of activations. Matrices are stored by
    `policy` if kernels of the device support that; otherwise a warning is logged once. Raises WeightsError with the names of
    missing, surplus and wrong-shape tensors."""

    def __init__(
        self, spec: DecoderSpec, source: TensorSource, policy: WeightPolicy, dtype: str, device: torch.device
    ) -> None:
        self._source, self._dtype, self._device = source, dtype, device
        self._linears = {f"{linear.name}.weight" for linear in spec.linears()}
        halves = (
            half
            for experts in spec.experts()
            for number in range(experts.num_experts)
            for half in experts.halves(number)
        )
        self._halves = {f"{half.name}.weight" for half in halves}
        exact = {f"{linear.name}.weight" for linear in spec.linears() if linear.float32} | _routers(spec)
        # A tied embedding is quantised on the first of several stages too, although the head is on the last.
        tied = {TABLE} if spec.tied_embedding and spec.all_layers.generates else set()
        self._online, self._rounded = policy.online, (self._linears | self._halves | tied) - exact
        self._loads = planned_loads(spec, source)
        self._kv_scales = kv_scale_loads(spec, source)
        if policy.online in _BY_DEVICE:
            self._rounded -= self._not_to_round(spec, policy.online)
        elif policy.online is None:
            self._rounded = set()
        keeping = Keeping(policy, dtype, source.types, self._rounded)
        matrices = [(load, self._refusal(load)) for load in self._loads if self._is_matrix(load.parameter.name)]
        self.storage = {load.parameter.name: keeping.storage(load, refusal) for load, refusal in matrices}
        self._types = {load.parameter.name: [source.types[shard.name] for shard in load.shards] for load in self._loads}
        for line in dict.fromkeys(filter(None, (keeping.widened(load, refusal) for load, refusal in matrices))):
            log.info(line)
        self._widen_mixed_experts(spec, replace(keeping, policy=replace(policy, keep_quantized=False)))

    def formats(self, name: str) -> frozenset[str]:
        """Return the formats of the rows of weight `name`, with the names of `ops.WeightFormat`."""
        if self.storage[name] == AS_STORED:
            return frozenset(self._types[name])
        return frozenset({self._online if name in self._rounded and self._online else self.storage[name]})

    def kv_scales(self) -> dict[str, tuple[float, float]]:
        """Return (scale of keys, scale of values) of an fp8 KV cache, by layer name."""
        loads = dict.fromkeys(load for pair in self._kv_scales.values() for load in pair)
        stream = self._source.stream(list(loads), "float32", lambda progress: None)
        # Of several scales, one per head, the largest is valid for all. Scales that are not positive were never measured.
        read = {load: float(values.max()) for load, (_, values) in zip(loads, stream, strict=True)}
        found = {layer: (read[k], read[v]) for layer, (k, v) in self._kv_scales.items()}
        return {layer: scales for layer, scales in found.items() if min(scales) > 0}

    def read(self, progress: Report) -> Iterator[tuple[str, ops.Stored]]:
        """Yield the name and value of each parameter, in order of use. A matrix includes its bias. `progress`: called with the
        number of stored bytes that have been read."""
        biases: dict[str, Tensor] = {}
        with (
            Uploads(self._device) if self._device.type == "cuda" else nullcontext() as uploads,
            closing(self._stream(uploads, progress)) as stream,
        ):
            for parameter, values in stream:
                name = parameter.name
                weight_name = name.removesuffix("bias") + "weight"
                if name.endswith(".bias") and weight_name in self._linears | self._halves:
                    biases[weight_name] = as_torch(values).to(self._place(weight_name))
                else:
                    yield name, self._stored(parameter, values, biases.pop(name, None))

    def _stream(self, uploads: Uploads | None, progress: Report) -> Generator[tuple[Parameter, Any], None, None]:
        def destination(parameter: Parameter, dtype: str) -> Destination | None:
            return None if uploads is None else uploads.begin(parameter.shape, DTYPES[dtype])

        return self._source.stream(self._loads, self._dtype, progress, self.storage, destination)

    def _stored(self, parameter: Parameter, values: Any, bias: Tensor | None) -> ops.Stored:
        if isinstance(values, list):
            return self._parts(parameter.name, values, bias)
        rounded = self._online in _BY_DEVICE and parameter.name in self._rounded
        weight = as_torch(values)
        if weight is not values:  # it was not uploaded
            weight = weight.to(self._device if rounded else self._place(parameter.name))
        if parameter.name not in self._rounded:
            return ops.StoredWeight.dense(weight, bias)
        assert self._online is not None
        if self._online in _BY_KERNELS:
            return _BY_KERNELS[self._online](weight, bias)
        return _BY_DEVICE[self._online](ops.StoredWeight.dense(weight, bias))

    def _parts(self, name: str, rows: list[StoredRows], bias: Tensor | None) -> ops.Stored:
        parts = [
            ops.StoredWeight.as_written(
                part.format, {role: torch.from_numpy(each).to(self._device) for role, each in part.arrays.items()}
            )
            for part in rows
        ]
        if (why := ops.apart(parts)) is not None:
            if name in self._halves:
                raise WeightsError(f"{name}: {why}; --quantization none dequantises them")
            log.info("%s becomes %s: %s", name, self._dtype, why)
            weight = torch.cat([ops.dequantize(part, DTYPES[self._dtype]) for part in parts])
            return ops.StoredWeight.dense(weight, bias)
        sizes = [len(part.weight) for part in parts]
        biases = [None] * len(parts) if bias is None else bias.split_with_sizes(sizes)
        return [part.with_bias(each) for part, each in zip(parts, biases, strict=True)]

    def _not_to_round(self, spec: DecoderSpec, online: str) -> set[str]:
        """Return the names of weights that are not quantised while loading: the head, matrices whose shapes the format does not
        support, and experts for which no kernel supports it."""
        shapes = (load.parameter for load in self._loads if load.parameter.name in self._rounded)
        uneven = {each.name for each in shapes if each.shape[0] % 16 or each.shape[1] % 64}
        why = ops.moe_refusal([ops.WeightFormat(online)], DTYPES[self._dtype], self._device) if self._halves else None
        if why is not None:
            log.info("experts are not rounded to %s: %s", online, why)
        return {f"{spec.head.name}.weight"} | uneven | (set() if why is None else self._halves)

    def _widen_mixed_experts(self, spec: DecoderSpec, plain: Keeping) -> None:
        """Mark all matrices of a layer's experts to be dequantised, if no kernel supports their formats together."""
        loads = {load.parameter.name: load for load in self._loads}
        for experts in spec.experts():
            names = [f"{half.name}.weight" for number in range(experts.num_experts) for half in experts.halves(number)]
            formats = sorted(frozenset().union(*map(self.formats, names)))
            why = ops.moe_refusal([ops.WeightFormat(each) for each in formats], DTYPES[self._dtype], self._device)
            if len(formats) > 1 and why is not None:
                log.info("experts in %s become %s: %s", " and ".join(formats), self._dtype, why)
                self._rounded -= set(names)
                self.storage |= {name: plain.storage(loads[name], self._refusal(loads[name])) for name in names}

    def _place(self, name: str) -> torch.device:
        return torch.device("cpu") if name in self._halves else self._device

    def _is_matrix(self, name: str) -> bool:
        return name in self._linears or name in self._halves or name == TABLE

    def _refusal(self, load: ReadPlan) -> Refusal:
        name, activations = load.parameter.name, DTYPES[self._dtype]
        refusal = ops.moe_refusal if name in self._halves else ops.linear_refusal
        refusal = ops.embedding_refusal if name == TABLE else refusal
        return lambda names: refusal([ops.WeightFormat(each) for each in sorted(names)], activations, self._device)


def planned_loads(spec: DecoderSpec, source: TensorSource) -> list[ReadPlan]:
    """Return how each parameter of `spec` is read, in order. Raises WeightsError with the names of tensors that do not match."""
    whole = spec.whole
    parameters = tuple(whole.parameters())
    # Some checkpoints contain a second copy of a tied embedding, or an unused head.
    ignored = spec.ignored if whole.generates and not spec.tied_embedding else (*spec.ignored, f"{HEAD}.weight")
    stored = spec.own(source.shapes)
    rules = fitting(parameters, (spec.rules, *spec.other_rules), stored)
    loads = plan(parameters, rules, stored, ignored=(*ignored, *KV_SCALES), ignored_below=spec.ignored_below)
    held = cuts(spec)
    own = {part.name: part for part in spec.parameters()}  # some experts may be on other devices
    return [
        reduced(load, own[name], held[name]) if name in held else load
        for load in loads
        if (name := load.parameter.name) in own
    ]


def _routers(spec: DecoderSpec) -> set[str]:
    """Return the names of router weights. They are not quantised, because quantisation could change the selected experts."""
    return {
        f"{block.router_linear(layer, spec.hidden_size).name}.weight"
        for layer, block in spec.blocks()
        if isinstance(block, MoE)
    }


def as_torch(values: Any) -> Tensor:
    """Convert a numpy array to a tensor. 16-bit integers are interpreted as bits of bfloat16. Tensors are returned unchanged."""
    if isinstance(values, Tensor):
        return values
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
