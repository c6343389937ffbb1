"""Custom tools, whose call has a text as input instead of JSON arguments. The model is given a function with one string argument
`input`. If the tool has a grammar, it constrains `input`.

The model writes the arguments as {"input": …}. If an unconstrained model writes other arguments, their text is the input."""

from __future__ import annotations

import json
import re
from typing import Final

from server.generate.request import ToolFunction
from server.generate.structured.grammar import Regex, Rules
from server.http.schema import InputGrammar

_INPUT: Final = "input"
_SCHEMA: Final = {
    "type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT], "additionalProperties": False,
}  # fmt: skip
_HEAD: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PLAIN: Final = r'[^"\\]'
# A pair of surrogates is one character: neither half of it is let out alone.
_UNITS: Final = re.compile(
    rf'(?:{_PLAIN}|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{{2}}\\u[0-9a-fA-F]{{4}}|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}})*'
)


def custom_function(name: str, description: str | None, given: InputGrammar | None) -> ToolFunction:
    """Return the function that represents a custom tool. `given`: grammar of the input, which is added to the description."""
    if given is None:
        return ToolFunction(name, description or None, _SCHEMA)
    is_regex = given.syntax == "regex"
    words = "a regular expression" if is_regex else "a grammar in Lark's syntax"
    description = "\n\n".join(filter(None, (description, f"The input keeps to {words}:\n{given.definition}")))
    grammar = Regex(given.definition) if is_regex else Rules(given.definition)
    return ToolFunction(name, description, _SCHEMA, strict=True, input_grammar=grammar)


def arguments_of(text: str) -> str:
    """Return JSON arguments whose `input` is `text`."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Extract the input text from complete JSON arguments."""
    reader = InputReader()
    return reader.feed(arguments) + reader.end()


class InputReader:
    """Incremental reader that extracts the input text from streamed JSON arguments."""

    def __init__(self) -> None:
        self._text = ""  # not let out yet
        self._is_inside = False
        self._is_over = False

    def feed(self, arguments: str) -> str:
        """Append `arguments`, a piece of JSON. Return the input characters that are now complete."""
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
        """End the arguments. Return the last characters if the input was truncated, or all arguments if they have another form."""
        if self._is_over:
            return ""
        self._is_over = True
        return self._text


def _decoded(units: str) -> str:
    decoded: str = json.loads(f'"{units}"', strict=False) if units else ""
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
