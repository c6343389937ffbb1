"""Loading: from model files to a Decoder, one parameter at a time.

The plan is checked against what the checkpoint holds before anything is read. Each linear layer is prepared as soon as it
is complete and its source dropped: memory peaks at one copy of the model and a few tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import ops
from runtime.config import WeightPolicy
from runtime.models.blocks.weights import Weights
from runtime.models.decoder import Decoder
from runtime.models.kept import Kept
from runtime.models.registry import spec_from_config
from runtime.models.spec.decoder import EMBEDDING, HEAD, DecoderSpec
from runtime.models.spec.linear import Linear
from runtime.models.spec.moe import ClampedSwiglu, Experts, MoE
from runtime.weights.rules import Checkpoint, Load, Report, TensorSource, WeightsError, fitting, plan, stored_as

_TABLE = f"{EMBEDDING}.weight"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    files: Checkpoint,
    *,
    dtype: str,
    load_format: str,
    seed: int,
    progress: Report,
    max_model_len: int | None = None,
    device: str = "cpu",
    weights: WeightPolicy | None = None,
    spec: DecoderSpec | None = None,
) -> Decoder:
    """`spec`: of the files' config, unless it is to be read here. `dtype`: of activations, and of weights unless `weights` says
    how those are kept. `files`: a `weights.fetch.ModelFiles`. `max_model_len`: positions that will be asked for, by default all
    that the model was made for; it sizes the rotary tables. `progress` counts stored bytes. Each tensor goes to `device` as
    soon as it is read, so the host holds a few at a time.

    Raises WeightsError where config and weights do not fit each other, UnsupportedModel where they ask for too much."""
    if dtype not in DTYPES:
        raise WeightsError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    spec = spec or spec_from_config(files.config)
    parameters = tuple(spec.parameters())
    expected = {shard.name: shard.shape for p in parameters for shard in stored_as(p, spec.rules).shards}
    with files.open_tensors(load_format, expected, seed) as source:
        # Some checkpoints carry a second copy of a tied embedding.
        ignored = (*spec.ignored, f"{HEAD}.weight") if spec.tied_embedding else spec.ignored
        rules = fitting(parameters, (spec.rules, *spec.other_rules), source.shapes)
        loads = plan(parameters, rules, source.shapes, ignored=ignored, ignored_below=spec.ignored_below)
        kept = Kept(weights or WeightPolicy(dtype), dtype, source.types, ops.block_types(torch.device(device)))
        read = _read(spec, source, loads, kept, torch.device(device), progress)
    return Decoder.build(spec, read, dtype=dtype, device=device, max_positions=max_model_len or spec.max_model_len)


def _read(
    spec: DecoderSpec, source: TensorSource, loads: list[Load], kept: Kept, device: torch.device, progress: Report
) -> Weights:
    linear_names = {f"{linear.name}.weight": linear.name for linear in spec.linears()}
    exact = {f"{linear.name}.weight" for linear in spec.linears() if linear.float32} | _routers(spec)
    places = {f"{half.name}.weight": place for place, half in _expert_halves(spec)}
    linears: dict[str, ops.LinearWeight] = {}
    tensors: dict[str, Tensor] = {}
    experts = {each.name: ops.prepare_experts(_shape(each), DTYPES[kept.dtype], device) for each in spec.experts()}
    matrices = linear_names.keys() | places.keys() | {_TABLE}
    storage = {load.parameter.name: kept.storage(load) for load in loads if load.parameter.name in matrices}
    for parameter, values in source.stream(loads, kept.dtype, progress, storage):
        name = parameter.name
        bias_name = name.removesuffix("weight") + "bias"
        if name in places:  # copied to where it belongs, wherever that is
            place, bias = places[name], tensors.pop(bias_name, None)
            _fill(experts[place.experts], place, values, bias, rounded=kept.wanted.online_int8)
        elif name in linear_names:
            rounded = kept.wanted.online_int8 and name not in exact
            bias = tensors.pop(bias_name, None)
            linears[linear_names[name]] = _prepare(values, bias, DTYPES[kept.dtype], device, rounded=rounded)
        elif name == _TABLE and storage[name] != kept.dtype:  # its rows can be read out of whatever form a matrix has
            linears[EMBEDDING] = _prepare(values, None, DTYPES[kept.dtype], device)
        else:
            tensors[name] = as_torch(values).to(device)
    return Weights(linears, tensors, experts)


def _fill(experts: ops.ExpertWeights, place: _Place, values: Any, bias: Tensor | None, *, rounded: bool) -> None:
    if isinstance(values, list):
        experts.fill_blocks(place.half, place.number, _block_rows(values), bias)
    elif rounded:
        experts.fill_int8(place.half, place.number, as_torch(values), bias)
    else:
        experts.fill(place.half, place.number, as_torch(values), bias)


def _prepare(
    values: Any, bias: Tensor | None, activations: torch.dtype, device: torch.device, *, rounded: bool = False
) -> ops.LinearWeight:
    if isinstance(values, list):
        return ops.prepare_block_linear(_block_rows(values), bias)
    weight = as_torch(values).to(device)
    if rounded:
        return ops.prepare_int8_linear(weight, bias)
    return ops.prepare_linear(weight, bias, torch.promote_types(weight.dtype, activations))


def _routers(spec: DecoderSpec) -> set[str]:
    """Rounded, they might choose other experts."""
    return {
        f"{block.router_linear(layer, spec.hidden_size).name}.weight"
        for layer, block in spec.blocks()
        if isinstance(block, MoE)
    }


class _Place(NamedTuple):
    """Of one expert's gate_up or down."""

    experts: str
    number: int
    half: Literal["gate_up", "down"]


def _expert_halves(spec: DecoderSpec) -> Iterator[tuple[_Place, Linear]]:
    for experts in spec.experts():
        for number in range(experts.num_experts):
            gate_up, down = experts.halves(number)
            yield _Place(experts.name, number, "gate_up"), gate_up
            yield _Place(experts.name, number, "down"), down


def _shape(experts: Experts) -> ops.ExpertShape:
    kind = experts.activation
    activation = ops.ClampedSwiglu(kind.alpha, kind.limit) if isinstance(kind, ClampedSwiglu) else kind.value
    return ops.ExpertShape(
        experts.num_experts, experts.hidden_size, experts.intermediate_size, experts.bias, activation, experts.gated
    )


def _block_rows(values: list[Any]) -> list[ops.BlockRows]:
    return [ops.BlockRows(part.type, torch.from_numpy(part.rows)) for part in values]


def as_torch(values: Any) -> Tensor:
    """16-bit integers are the bits of bfloat16."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
