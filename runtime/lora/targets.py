"""Targets: the decoder layers that an adapter may change, by their module name in checkpoints. They are derived from the
model's spec and its checkpoint rules, for all model families. Each part of a merged projection is a separate target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from runtime.models.adapters import adaptable, embedding_linear, expert_linears, vocabulary_linears
from runtime.models.spec.decoder import HEAD, DecoderSpec
from runtime.models.spec.linear import Linear
from runtime.weights.rules import Parameter, ReadPlan, Rule, Shard, Transform, Transposed, stored_as

T = TypeVar("T")

_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class LoRATarget:
    """Rows [start, start + rows) of `linear`. `transform`: converts from the checkpoint's row order; None if it is the same."""

    linear: Linear
    start: int
    rows: int
    transform: Transform | None = None


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Parameter of a module that contains the matrices of all experts of a layer. `targets`: one target per expert."""

    parameter: str
    targets: tuple[LoRATarget, ...]


class Targets(NamedTuple):
    """Layers that adapters may change, by all module names that checkpoints use. `stacks`: modules with stacked experts.
    `embeddings`: modules that are the token embedding; their target is the transposed matrix."""

    modules: Mapping[str, LoRATarget]
    stacks: Mapping[str, tuple[ExpertStack, ...]]
    embeddings: Mapping[str, LoRATarget] = MappingProxyType({})


def targets_of(spec: DecoderSpec, *, experts: bool = True, vocabulary: bool = True) -> Targets:
    """Return the targets of model `spec`. `experts`: include experts. `vocabulary`: include the embedding and the head."""
    linears = adaptable(spec)
    if vocabulary:
        linears += vocabulary_linears(spec)
    if experts:
        linears += [linear for _, by_half in expert_linears(spec) for linear in by_half.values()]
    modules: dict[str, LoRATarget] = {}
    embeddings: dict[str, LoRATarget] = {}
    stacks: dict[str, dict[str, list[LoRATarget]]] = {}
    for rules in (spec.rules, *spec.other_rules):
        if vocabulary:
            embedding = embedding_linear(spec)
            (stored,) = _stored(embedding, rules).shards
            embeddings.setdefault(_module(stored), LoRATarget(embedding, 0, embedding.out_features))
        found: dict[str, dict[str, list[LoRATarget]]] = {}
        for linear in linears:
            for shard, target in _targets(linear, rules):
                if shard.index is None:
                    modules.setdefault(_module(shard), target)
                else:
                    module, _, parameter = shard.name.rpartition(".")
                    found.setdefault(module, {}).setdefault(parameter, []).append(target)
        for module, parameters in found.items():
            stacks.setdefault(module, {}).update(parameters)
    for linear in linears:
        if linear.name == HEAD:  # name in transformers, whatever checkpoints use
            modules.setdefault(HEAD, LoRATarget(linear, 0, linear.out_features))
    return Targets(
        modules,
        {
            module: tuple(ExpertStack(name, tuple(targets)) for name, targets in parameters.items())
            for module, parameters in stacks.items()
        },
        embeddings,
    )


def find(targets: Targets, module: str) -> LoRATarget | None:
    """Return the target of a module name, or None. A leading "model." may be missing or extra."""
    return _found(targets.modules, module)


def find_embedding(targets: Targets, module: str) -> LoRATarget | None:
    """Return the target of a module name if the module is the token embedding, or None."""
    return _found(targets.embeddings, module)


def find_stacks(targets: Targets, module: str) -> tuple[ExpertStack, ...]:
    """Return the expert stacks of a module, or () if the module contains no matrices of experts."""
    return _found(targets.stacks, module) or ()


def _found(named: Mapping[str, T], module: str) -> T | None:
    for name in (module, _PREFIX + module, module.removeprefix(_PREFIX)):
        if name in named:
            return named[name]
    return None


def _targets(linear: Linear, rules: tuple[Rule, ...]) -> Iterator[tuple[Shard, LoRATarget]]:
    load = _stored(linear, rules)
    how = None if isinstance(load.transform, Transposed) else load.transform
    for index, shard in enumerate(load.shards):
        stop = load.shards[index + 1].start if index + 1 < len(load.shards) else linear.out_features
        yield shard, LoRATarget(linear, shard.start, stop - shard.start, how)


def _stored(linear: Linear, rules: tuple[Rule, ...]) -> ReadPlan:
    shape = (linear.out_features, linear.in_features)
    return stored_as(Parameter(f"{linear.name}.weight", shape, linear.parts, linear.stack), rules)


def _module(shard: Shard) -> str:
    return shard.name.removesuffix(".weight")
