"""The log: where its lines go, which of them, and what they look like. Standard library only."""

from __future__ import annotations

import logging

LINE = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def begin(level: str) -> None:
    """Lines of `level` or more severe go to stderr from now on."""
    logging.basicConfig(format=LINE)
    set_level(level)


def set_level(level: str) -> None:
    """`level`: as --log-level has it."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(number)
    logging.getLogger("uvicorn.error").setLevel(max(number, logging.WARNING))


def level() -> str:
    return logging.getLevelName(logging.getLogger().level).lower()
