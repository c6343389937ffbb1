"""Refusals: what a program is told where a client would get a 4xx. There is one set of rules, the wire types'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from server.http.errors import ApiError
from server.http.schema import Wire


def decoded(kind: Wire[Any], body: Mapping[str, Any]) -> Any:
    """`body` as a client would have sent it. Raises ValueError."""
    try:
        return kind.decode(msgspec.json.encode(body))
    except ApiError as error:
        raise as_value_error(error) from None
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a value is of no type that JSON has: {error}") from None


def as_value_error(error: ApiError) -> ValueError:
    named = error.param is None or error.param in error.message
    return ValueError(error.message if named else f"{error.param}: {error.message}")
