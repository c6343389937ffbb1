"""Sealed texts: what a client keeps for the model between two requests without looking into it, as `encrypted_content`.

Nothing is secret in it, and nothing is stored here: it is the text itself, marked as this server's."""

from __future__ import annotations

import base64
import binascii
from typing import Final

_MARK: Final = "oneloop1."


def seal(text: str) -> str:
    return _MARK + base64.urlsafe_b64encode(text.encode(errors="replace")).decode()


def unseal(sealed: str) -> str | None:
    """The text; None where another server made it."""
    if not sealed.startswith(_MARK):
        return None
    try:
        return base64.urlsafe_b64decode(sealed.removeprefix(_MARK)).decode()
    except (binascii.Error, ValueError):
        return None
