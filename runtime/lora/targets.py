"""Targets: which modules of a checkpoint an adapter may change, and where they are in the decoder. Derived from the spec and the
rules by which its checkpoints are written, for any family alike: a merged projection's parts are targets by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from runtime.models.adapters import adaptable
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.linear import Linear
from runtime.weights.rules import Load, Parameter, Rule, Transform, Transposed, stored_as

_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class Target:
    """Rows [start, start + rows) of `linear`. `transform`: its rows stand in another order in checkpoints."""

    linear: Linear
    start: int
    rows: int
    transform: Transform | None = None


def targets_of(spec: DecoderSpec) -> Mapping[str, Target]:
    """By the names that modules have in any of the ways to write a checkpoint of the model."""
    found: dict[str, Target] = {}
    for rules in (spec.rules, *spec.other_rules):
        for linear in adaptable(spec):
            for name, target in _targets(linear, rules):
                found.setdefault(name, target)
    return found


def find(targets: Mapping[str, Target], module: str) -> Target | None:
    """The target of a module's name, which may have a "model." more or less at its beginning than checkpoints have."""
    for name in (module, _PREFIX + module, module.removeprefix(_PREFIX)):
        if name in targets:
            return targets[name]
    return None


def _targets(linear: Linear, rules: tuple[Rule, ...]) -> Iterator[tuple[str, Target]]:
    parameter = Parameter(
        f"{linear.name}.weight", (linear.out_features, linear.in_features), linear.parts, linear.stack
    )
    load: Load = stored_as(parameter, rules)
    how = None if isinstance(load.transform, Transposed) else load.transform
    for index, shard in enumerate(load.shards):
        if shard.index is None:  # a slice of a stack is no module
            stop = load.shards[index + 1].start if index + 1 < len(load.shards) else linear.out_features
            yield shard.name.removesuffix(".weight"), Target(linear, shard.start, stop - shard.start, how)
