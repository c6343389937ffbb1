"""Features of a scheduler, found and exchanged by class."""

from __future__ import annotations

from typing import TypeVar

from runtime.feature import Feature
from runtime.scheduler import Scheduler

F = TypeVar("F", bound=Feature)


def feature_of(scheduler: Scheduler, kind: type[F]) -> F:
    (found,) = [feature for feature in scheduler.features if isinstance(feature, kind)]
    return found


def has_feature(scheduler: Scheduler, kind: type[Feature]) -> bool:
    return any(isinstance(feature, kind) for feature in scheduler.features)


def exchange(scheduler: Scheduler, kind: type[F], new: F | None) -> None:
    """Put `new`, or nothing, in the place of the feature of that class, if there is one."""
    scheduler.features = [feature for feature in scheduler.features if not isinstance(feature, kind)]
    if new is not None:
        new.connect(scheduler)
        scheduler.features.append(new)
