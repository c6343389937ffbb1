"""Cases of a matrix that only the nightly run has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def on_push(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return parameters of which a push runs the `chosen` and the nightly run all."""
    cases = list(cases)
    assert not [each for each in chosen if each not in cases]
    return [case if case in chosen else _nightly(case) for case in cases]


def _nightly(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)
