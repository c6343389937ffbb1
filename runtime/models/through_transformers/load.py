"""Loading of a decoder run through transformers: transformers' modules with weights from our readers.

Stored tensors have transformers' names and layouts, but only our readers open files. A loaded model is compared with transformers'
own attention, and served only if they agree."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import ops
from runtime.api import LoadProgress
from runtime.config import WeightPolicy
from runtime.models.kv_scales import KV_SCALES
from runtime.models.reading import NARROW, as_torch
from runtime.models.spec.model import UnsupportedModel
from runtime.models.through_transformers.agreement import check_agreement, probe_ids
from runtime.models.through_transformers.describe import PAGED, on_meta, said
from runtime.models.through_transformers.model import TransformersModel, round_linears
from runtime.models.through_transformers.spec import TransformersSpec
from runtime.weights.rules import (
    Checkpoint,
    Parameter,
    Report,
    Shape,
    TensorSource,
    WeightsError,
    refuse_misfit,
    shape_text,
    stored_as,
)

_IGNORED = (".rotary_emb.inv_freq", *KV_SCALES)  # old checkpoints contain the first; it is not needed


def load(
    spec: TransformersSpec, files: Checkpoint, *, dtype: str, load_format: str, seed: int, progress: Report,
    device: str = "cpu", weights: WeightPolicy | None = None,
) -> TransformersModel:  # fmt: skip
    """Load a model. Arguments are those of `models.load.load_model`. All weights are read in `dtype`. Linear layers are then
    converted by the policy `weights`. Raises WeightsError if config and weights do not match, and UnsupportedModel if outputs
    differ from transformers' own."""
    if weights is not None and weights.online is not None:
        raise UnsupportedModel(
            f"quantization {weights.online} is not supported for models that run through transformers"
        )
    described = on_meta(spec.architecture, spec.config)
    with files.open_tensors(load_format, state_shapes(described), seed) as source:
        types = set(source.types.values())
        causal = _fill(spec, source, dtype, device, progress, _experts(described, getattr(torch, dtype)))
    stored = with_format(weights or WeightPolicy(dtype), dtype, types, device)
    ids = torch.tensor([probe_ids(spec.vocab_size)], device=device)
    causal.config._attn_implementation = "eager"
    try:
        with torch.inference_mode():
            round_linears(causal, getattr(torch, stored))
            expected = causal(input_ids=ids, use_cache=False).logits[0]
        causal.config._attn_implementation = PAGED
        model = TransformersModel(spec, causal, causal.base_model_prefix, dtype=dtype, device=device, linears=stored)
        check_agreement(model, expected)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError, KeyError) as error:
        raise UnsupportedModel(
            f"transformers' modules cannot compute tokens of several sequences side by side{said(error)}"
        ) from error
    return model


def with_format(weights: WeightPolicy, dtype: str, types: set[str], device: str) -> str:
    """Return the dtype of linear layers: that of the policy, or for "stored" the checkpoint's 16-bit dtype, if kernels support
    it."""
    if weights.dense_dtype != "stored":
        return weights.dense_dtype
    narrow = {NARROW.get(each, dtype) for each in types}
    formats = [ops.WeightFormat(each) for each in narrow]
    refusal = ops.linear_refusal(formats, getattr(torch, dtype), torch.device(device))
    return narrow.pop() if len(narrow) == 1 and refusal is None else dtype


def state_shapes(model: nn.Module) -> dict[str, Shape]:
    """Return the shapes of the model's tensors by name. Tied tensors appear once."""
    parameters = dict(model.named_parameters())
    own = set(parameters) | (set(model.state_dict()) & {name for name, _ in model.named_buffers()})
    return {name: tuple(each.shape) for name, each in model.state_dict().items() if name in own}


def _experts(model: nn.Module, dtype: torch.dtype) -> str | None:
    """Return the name of transformers' implementation of experts. None is its default, the grouped one. "eager" is used if sizes
    are not aligned to 16 bytes, which torch's grouped kernel requires."""
    stacks = [each for each in model.parameters() if each.ndim == 3]
    aligned = all(size * dtype.itemsize % 16 == 0 for stack in stacks for size in stack.shape[1:])
    return None if aligned else "eager"


def _fill(
    spec: TransformersSpec, source: TensorSource, dtype: str, device: str, progress: Report, experts: str | None
) -> Any:
    names = [name for name in source.shapes if not name.endswith(_IGNORED)]
    try:
        with read_when_needed():
            causal, found = getattr(transformers, spec.architecture).from_pretrained(
                None, config=spec.config, state_dict=lazily(source, names, progress), dtype=getattr(torch, dtype),
                attn_implementation=PAGED, experts_implementation=experts, ignore_mismatched_sizes=True,
                output_loading_info=True, device_map={"": device},
            )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        raise WeightsError(f"transformers cannot make the model of these weights{said(error)}") from error
    misshapen = [
        f"{name} is {shape_text(stored)} instead of {shape_text(wanted)}"
        for name, stored, wanted in sorted(found["mismatched_keys"])
    ]
    refuse_misfit(sorted(found["missing_keys"]), misshapen, sorted(found["unexpected_keys"]))
    return causal


def lazily(source: TensorSource, names: Sequence[str], progress: Report) -> dict[str, Any]:
    """Return a state dict for transformers whose tensors are read from `source` on first access."""
    reading = _Reading(source, progress, len(names))
    return {name: _Stored(name, source.shapes[name], reading) for name in names}


@dataclass(slots=True)
class _Reading:
    source: TensorSource
    progress: Report
    total: int
    num_read: int = 0


@dataclass(frozen=True, slots=True)
class _Stored:
    """Tensor of a checkpoint that is read when it is accessed, like safetensors' slices. It is read in its own dtype if torch has
    it, else in float32."""

    name: str
    shape: Shape
    reading: _Reading

    def __getitem__(self, everything: object) -> Tensor:
        source, load = self.reading.source, stored_as(Parameter(self.name, self.shape or (1,)), ())
        dtype = NARROW.get(source.types[self.name], "float32")
        ((_, values),) = source.stream([load], dtype, lambda progress: None)
        self.reading.num_read += 1
        self.reading.progress(LoadProgress("weights", self.reading.num_read, self.reading.total, "tensors"))
        return as_torch(values).view(self.shape)


@contextmanager
def read_when_needed() -> Iterator[None]:
    """Context manager that stops transformers from reading the checkpoint ahead in threads, which stores merged tensors twice."""
    switch = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before
