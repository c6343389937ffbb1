"""Loading of a Decoder from model files, one parameter at a time.

Each linear layer is prepared as soon as it is read, and its source is freed. The peak memory is one copy of the model and a few
tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import ops
from runtime.config import WeightPolicy
from runtime.models.adapters import AdapterRoom, ModelAdapters
from runtime.models.blocks.shared_out import put_together
from runtime.models.blocks.weights import Weights, expert_halves
from runtime.models.decoder import Decoder
from runtime.models.draft_head import DraftHead
from runtime.models.reading import DTYPES, TABLE, ParameterReader
from runtime.models.registry import spec_from_config
from runtime.models.spec.decoder import EMBEDDING, DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec
from runtime.models.spec.mlp import ClampedSwiglu, Experts
from runtime.parallel.group import Peers
from runtime.parallel.stages import StageIO
from runtime.weights.rules import Checkpoint, Report, WeightsError, stored_as


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
    adapters: AdapterRoom | None = None,
    peers: Peers | None = None,
    stage: StageIO | None = None,
    counts_experts: bool = False,
) -> Decoder:
    """Load a model from `files`, a `weights.fetch.ModelFiles`.

    - `spec`: spec of the model; by default it is read from the config
    - `dtype`: dtype of activations, and of weights unless `weights` sets another
    - `max_model_len`: number of positions of the rotary tables, by default the model's
    - `progress`: called with the number of bytes read
    - `device`: each tensor is copied to it as soon as it is read
    - `adapters`: memory limits of LoRA adapters
    - `peers`: the other ranks, if `spec` is a shard; `stage`: transfers hidden states, if `spec` is a pipeline stage
    - `counts_experts`: count tokens per expert

    Raises WeightsError if config and weights do not match, and UnsupportedModel if they need unsupported features."""
    spec = spec or spec_from_config(files.config)
    with opened(spec, files, dtype=dtype, load_format=load_format, seed=seed, device=device, policy=weights) as reader:
        read = read_weights(spec, reader, dtype=dtype, device=device, progress=progress)
    kept = None
    if adapters is not None:
        read, kept = ModelAdapters.around(read, spec, adapters, dtype=dtype, device=device)
    if peers is not None:
        read = put_together(spec, read, peers)
    if counts_experts:
        counts = {
            each.name: torch.zeros(each.num_routed or each.num_experts, dtype=torch.int64, device=device)
            for each in spec.experts()
        }
        read = read._replace(counts=counts)
    longest = max_model_len or spec.max_model_len
    return Decoder.build(spec, read, dtype=dtype, device=device, max_positions=longest, adapters=kept, stage=stage)


def load_draft_head(
    spec: DraftHeadSpec, files: Checkpoint, model: Decoder, *, load_format: str, seed: int, progress: Report,
    max_model_len: int, weights: WeightPolicy | None = None,
) -> DraftHead:  # fmt: skip
    """Load a draft head for `model`, with the model's dtype and device. Arguments are those of `load_model`; `files` may be the
    model's. Raises WeightsError if config and weights do not match."""
    dtype, device = model.dtype, model.device
    with opened(spec, files, dtype=dtype, load_format=load_format, seed=seed, device=device, policy=weights) as reader:
        read = read_weights(spec, reader, dtype=dtype, device=device, progress=progress)
    return DraftHead.build(spec, read, model, max_positions=max_model_len)


@contextmanager
def opened(
    spec: DecoderSpec, files: Checkpoint, *, dtype: str, load_format: str, seed: int, device: str,
    policy: WeightPolicy | None,
) -> Iterator[ParameterReader]:  # fmt: skip
    """Context manager that opens the parameters of `files` and yields their reader. Arguments are those of `load_model`."""
    if dtype not in DTYPES:
        raise WeightsError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    expected = {shard.name: shard.shape for p in spec.whole.parameters() for shard in stored_as(p, spec.rules).shards}
    with files.open_tensors(load_format, expected, seed) as source:
        yield ParameterReader(spec, source, policy or WeightPolicy(dtype), dtype, torch.device(device))


def read_weights(spec: DecoderSpec, reader: ParameterReader, *, dtype: str, device: str, progress: Report) -> Weights:
    """Read all parameters of `spec` and prepare them for the kernels of `device`."""
    activations = DTYPES[dtype]
    linear_names = {f"{linear.name}.weight": linear.name for linear in spec.linears()}
    # The table can be read from any format; a draft head may have none.
    linear_names |= {TABLE: EMBEDDING} if TABLE in reader.storage and reader.formats(TABLE) != {dtype} else {}
    halves = expert_halves(spec)
    linears: dict[str, ops.LinearWeight] = {}
    tensors: dict[str, Tensor] = {}
    experts = {
        each.name: ops.prepare_experts(_shape(each), activations, torch.device(device), _formats(each, reader))
        for each in spec.experts()
    }
    for name, stored in reader.read(progress):
        if name in halves:
            of, half, number = halves[name]
            experts[of].fill(half, number, stored)
        elif name in linear_names:
            linears[linear_names[name]] = ops.prepare_linear(stored, _activations(stored, activations))
        else:
            assert isinstance(stored, ops.StoredWeight)
            tensors[name] = stored.weight
    ops.read_in_turn([linears[linear.name] for linear in spec.linears() if linear.name in linears])
    return Weights(linears, tensors, experts, {}, reader.kv_scales())


def _activations(stored: ops.Stored, activations: torch.dtype) -> torch.dtype:
    """Return the dtype of the activations that are multiplied by a matrix. It is wider than `activations` for a float32 router."""
    parts = [stored] if isinstance(stored, ops.StoredWeight) else stored
    own = parts[0].format.dtype
    return activations if own is None else torch.promote_types(own, activations)


def _formats(experts: Experts, reader: ParameterReader) -> list[ops.WeightFormat]:
    names = (f"{half.name}.weight" for number in range(experts.num_experts) for half in experts.halves(number))
    return [ops.WeightFormat(each) for each in sorted(frozenset().union(*map(reader.formats, names)))]


def _shape(experts: Experts) -> ops.ExpertShape:
    kind = experts.activation
    activation = kind if isinstance(kind, ClampedSwiglu) else kind.value
    return ops.ExpertShape(
        experts.num_experts,
        experts.hidden_size,
        experts.intermediate_size,
        experts.bias,
        activation,
        experts.gated,
        experts.first,
        experts.num_routed,
    )
