"""Pipeline stages: specs of consecutive layers, one stage for each of several groups of devices.

The first stage has the embedding, the last one the output head or pooler. A tied embedding is in both. These are pure functions
on data; the caller transfers hidden states between stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

from runtime.kv.kinds import MemoryKind
from runtime.models.spec.decoder import DecoderSpec, StageOf
from runtime.models.spec.draft_head import DraftHeadSpec
from runtime.models.spec.layer import HybridLayer
from runtime.models.spec.model import ModelSpec, UnsupportedModel
from runtime.models.spec.pooler import POOLS_LAST
from runtime.weights.rules import Parameter


def stages(spec: DecoderSpec, size: int, draft: ModelSpec | None = None) -> tuple[DecoderSpec, ...]:
    """Split `spec` into `size` stages that read about the same amount of weights per step. `spec` may be a shard. Names are
    unchanged.

    `draft`: draft model or draft head on the last stage; its KV caches follow those of that stage. Raises UnsupportedModel."""
    if size == 1:
        return (spec,)
    num_layers = len(spec.layers)
    if num_layers < size:
        raise UnsupportedModel(f"{spec.architecture} has {num_layers} layers, too few for {size} stages")
    if spec.encoder is not None:
        raise UnsupportedModel(f"{spec.architecture} does not support pipeline stages: it has an encoder")
    counts = even_layers(spec, size)
    firsts = tuple(accumulate(counts, initial=0))
    kinds = [_kinds(spec, first, first + count) for first, count in zip(firsts, counts, strict=False)]
    lends = isinstance(draft, DraftHeadSpec) and not draft.own_embedding
    if draft is not None:
        kinds[-1] += draft.memory_kinds()
    if any(layer < firsts[size - 1] for layer in spec.aux_layers):
        raise UnsupportedModel(
            f"{spec.architecture} cannot be cut into {size} stages: its draft head reads layers "
            f"{', '.join(map(str, spec.aux_layers))}, of which the last stage has those from {firsts[size - 1]} on"
        )
    return tuple(_stage(spec, number, size, firsts[number], counts[number], kinds, lends) for number in range(size))


def _kinds(spec: DecoderSpec, first: int, stop: int) -> list[MemoryKind]:
    return [mixer.memory_kind for layer in spec.layers[first:stop] for mixer in layer.mixers]


def _stage(
    spec: DecoderSpec,
    number: int,
    size: int,
    first: int,
    count: int,
    kinds: Sequence[Sequence[MemoryKind]],
    lends: bool,
) -> DecoderSpec:
    most: Counter[MemoryKind] = Counter()
    for each in kinds:
        most |= Counter(each)
    elsewhere = tuple((most - Counter(kinds[number])).elements())
    stage_of = StageOf(spec, number, size, first, elsewhere, lends=lends and number == size - 1)
    aux_layers = tuple(layer - first for layer in spec.aux_layers) if stage_of.is_last else ()
    stage = replace(spec, layers=spec.layers[first : first + count], stage_of=stage_of, aux_layers=aux_layers)
    if not stage_of.is_first:
        stage = replace(stage, positions=None, num_token_types=0, embedding_norm=None)
    return stage if stage_of.is_last else replace(stage, generates=False, pooler=POOLS_LAST)


def keeps_embedding(spec: DecoderSpec) -> bool:
    """Return whether some layer needs the initial residual stream."""
    return any(isinstance(layer, HybridLayer) for layer in spec.layers)


def even_layers(spec: DecoderSpec, size: int) -> list[int]:
    """Return the number of layers of each stage, such that the weights of the largest stage, including the output head, are
    minimal."""
    sizes = [_num(layer.parameters("", spec.hidden_size)) for layer in spec.layers]
    sizes[-1] += prod((spec.head.out_features, spec.head.in_features)) if spec.generates else 0
    totals = list(accumulate(sizes, initial=0))
    num_layers = len(sizes)
    # By number of stages: for the first n layers, the size of the largest stage, and the first layer of the last stage.
    best = [[(totals[stop], 0) for stop in range(num_layers + 1)]]
    for stage in range(1, size):
        row = [(totals[-1] + 1, 0)] * (num_layers + 1)
        for stop in range(stage + 1, num_layers + 1):
            row[stop] = min(
                (max(best[-1][start][0], totals[stop] - totals[start]), start) for start in range(stage, stop)
            )
        best.append(row)
    counts, stop = [], num_layers
    for row in reversed(best):
        start = row[stop][1]
        counts.append(stop - start)
        stop = start
    return counts[::-1]


def _num(parameters: Iterable[Parameter]) -> int:
    return sum(prod(parameter.shape) for parameter in parameters)
