"""InputReader: the text that a call of a custom tool passes, out of the arguments in which the model writes it, as they arrive.

The arguments are {"input": …}. Where a model that nothing held to that wrote others, these are the text, as they are."""

from __future__ import annotations

import json
import re
from typing import Final

_HEAD: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PLAIN: Final = r'[^"\\]'
# A pair of surrogates is one character: neither half of it is let out alone.
_UNITS: Final = re.compile(
    rf'(?:{_PLAIN}|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{{2}}\\u[0-9a-fA-F]{{4}}|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}})*'
)


class InputReader:
    def __init__(self) -> None:
        self._text = ""  # not let out yet
        self._is_inside = False
        self._is_over = False

    def feed(self, arguments: str) -> str:
        """What of the input became certain."""
        if self._is_over:
            return ""
        self._text += arguments
        if not self._is_inside:
            head = _HEAD.match(self._text)
            if head is None:
                return ""
            self._is_inside, self._text = True, self._text[head.end() :]
        whole = _UNITS.match(self._text)
        assert whole is not None, "it may be empty"
        self._text = self._text[whole.end() :]
        self._is_over = self._text.startswith('"')
        return _decoded(whole.group())

    def end(self) -> str:
        """What is left: of arguments that are something else all of them, and of an input that broke off its last characters."""
        if self._is_over:
            return ""
        self._is_over = True
        return self._text


def _decoded(units: str) -> str:
    decoded: str = json.loads(f'"{units}"', strict=False) if units else ""
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
