"""Choice of the picture for given records, and whether it can be drawn. Without matplotlib, which `charts.py` imports on
demand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from loadtests.saved import Record

SUFFIXES = (".svg", ".png")


class CannotDraw(ValueError):
    """No such kind of picture, or nothing here that could draw it."""


def check_pictures(paths: Iterable[Path]) -> None:
    """Check that pictures can be written, before hours of measuring. Raises CannotDraw, OSError."""
    for path in paths:
        if path.suffix not in SUFFIXES:
            raise CannotDraw(f"{path}: unsupported image format; use {' or '.join(SUFFIXES)}")
        if not path.parent.is_dir():
            raise CannotDraw(f"{path}: there is no folder {path.parent}")
        try:
            from loadtests import charts  # noqa: F401 (half a second, only where there is something to draw)
        except ImportError as error:
            raise CannotDraw(f"charts need matplotlib ({error}): pip install 'oneloop[bench]'") from None


def draw(path: Path, records: Sequence[Record]) -> None:
    """Runs as distributions and over time; levels of a sweep as throughput against latency."""
    from loadtests.charts import draw_levels, draw_runs

    levels = [record for record in records if record.get("kind") == "level"]
    if levels:
        draw_levels(path, levels)
    else:
        draw_runs(path, records)


def draw_traffic(path: Path, figures: Mapping[str, Mapping[str, float]]) -> None:
    """Figures of `gpu` by model, beside vLLM's."""
    from loadtests.charts import draw_traffic as charted

    charted(path, figures)
