"""Drawing of charts: selects the chart for records, and checks that it can be drawn. `charts.py` (matplotlib) is imported when
needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from loadtests.saved import Record

SUFFIXES = (".svg", ".png")


class CannotDraw(ValueError):
    """Error: the image format is not supported, or matplotlib is not installed."""


def check_pictures(paths: Iterable[Path]) -> None:
    """Check that charts can be written to `paths`, before a long measurement. Raises CannotDraw, OSError."""
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
    """Draw a chart of `records`: distributions and time course of runs, or throughput and latency of a sweep's levels."""
    from loadtests.charts import draw_levels, draw_runs

    levels = [record for record in records if record.get("kind") == "level"]
    if levels:
        draw_levels(path, levels)
    else:
        draw_runs(path, records)


def draw_traffic(path: Path, figures: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the figures that `gpu` measured, by model, next to vLLM's."""
    from loadtests.charts import draw_traffic as charted

    charted(path, figures)
