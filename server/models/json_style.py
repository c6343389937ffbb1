"""JsonStyle: how JSON of a given form is written where a request does not say: its white space and its properties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Whitespace = Literal["compact", "none", "any"]


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """`whitespace`: "compact" is one space at most, behind a comma or a colon; "any" has room for indentation. `closed`: objects
    that list their properties have no others, unless their schema says so."""

    whitespace: Whitespace = "compact"
    closed: bool = True
