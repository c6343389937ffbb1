"""Loading: from model files to a Decoder, one parameter at a time.

The plan is checked against what the checkpoint holds before anything is read. Each linear layer is prepared as soon as it
is complete and its source dropped: memory peaks at one copy of the model and a few tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import ops
from runtime.models.decoder import Decoder
from runtime.models.registry import spec_from_config
from runtime.models.spec import HEAD, DecoderSpec
from runtime.weights.rules import Checkpoint, Load, Report, TensorSource, WeightsError, plan, stored_as

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
) -> Decoder:
    """`files`: a `weights.fetch.ModelFiles`. `max_model_len`: positions that will be asked for, by default all that the
    model was made for; it sizes the rotary tables. `progress` counts stored bytes. Each tensor goes to `device` as soon as
    it is read, so the host holds a few at a time.

    Raises WeightsError where config and weights do not fit each other, UnsupportedModel where they ask for too much."""
    if dtype not in DTYPES:
        raise WeightsError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    spec = spec_from_config(files.config)
    parameters = tuple(spec.parameters())
    expected = {piece.name: piece.shape for p in parameters for piece in stored_as(p, spec.rules).pieces}
    with files.open_tensors(load_format, expected, seed) as source:
        linears, tensors = _read(spec, source, dtype, torch.device(device), progress)
    return Decoder(
        spec, linears, tensors, dtype=dtype, device=device, max_positions=max_model_len or spec.max_model_len
    )


def _read(
    spec: DecoderSpec, source: TensorSource, dtype: str, device: torch.device, progress: Report
) -> tuple[dict[str, ops.LinearWeight], dict[str, Tensor]]:
    # Some checkpoints carry a second copy of a tied embedding.
    ignored = (*spec.ignored, f"{HEAD}.weight") if spec.tied_embedding else spec.ignored
    loads = plan(spec.parameters(), spec.rules, source.shapes, ignored=ignored)
    linear_names = {f"{linear.name}.weight": linear.name for linear in spec.linears()}
    linears: dict[str, ops.LinearWeight] = {}
    tensors: dict[str, Tensor] = {}
    for name, stored in _as_torch(source, loads, dtype, progress):
        tensor = stored.to(device)
        if name in linear_names:
            linear = linear_names[name]
            linears[linear] = ops.prepare_linear(tensor, tensors.pop(f"{linear}.bias", None))
        else:
            tensors[name] = tensor
    return linears, tensors


def _as_torch(source: TensorSource, loads: list[Load], dtype: str, progress: Report) -> Iterator[tuple[str, Tensor]]:
    for parameter, values in source.stream(loads, dtype, progress):
        tensor = torch.from_numpy(values)
        yield parameter.name, tensor.view(DTYPES[dtype]) if dtype == "bfloat16" else tensor
