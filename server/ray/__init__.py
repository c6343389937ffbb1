"""Server as a Ray Serve application: `python -m server ray`, or `serve run server.ray:app`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(options: Mapping[str, Any]) -> Any:
    """Return the application for `serve run server.ray:app replicas=2 model=FOLDER`. `options`: by name. Raises ConfigError."""
    from server.ray.application import build  # ray, which is an extra
    from server.ray.options import RayOptions

    return build(*RayOptions.of_names(options))
