"""Logging: destination, levels and line formats. A line is text or one JSON object.

If a line belongs to a request, it contains the id, from the context or from `extra={"request_id": …}`. Standard library only."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from server.http.call import CURRENT_ID

LINE = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def begin(level: str, kind: str = "text") -> None:
    """Start logging to stderr. `level`: least severe level that is logged. `kind`: value of --log-format."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    logging.basicConfig(handlers=[handler])
    set_level(level)


def set_level(level: str) -> None:
    """Set the level of all loggers. `level`: value of --log-level."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(number)
    logging.getLogger("uvicorn.error").setLevel(max(number, logging.WARNING))


def level() -> str:
    return logging.getLevelName(logging.getLogger().level).lower()


def _request_id(record: logging.LogRecord) -> str | None:
    return getattr(record, "request_id", None) or CURRENT_ID.get()


class TextLines(logging.Formatter):
    """Formatter of text lines. It appends the request id if the message lacks it."""

    def __init__(self) -> None:
        super().__init__(LINE)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line, id = super().formatMessage(record), _request_id(record)
        return line if id is None or id in line else f"{line} [{id}]"


class JsonLines(logging.Formatter):
    """Formatter of JSON lines: `time`, `level`, `logger`, `message`, and `request_id` and `exception` if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (id := _request_id(record)) is not None:
            line["request_id"] = id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
