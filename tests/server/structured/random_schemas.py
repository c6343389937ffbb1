"""Random JSON schemas, and random texts drawn under a matcher's masks: what a model without a clue would write."""

from __future__ import annotations

import random
from typing import Any

from runtime.api import TokenMatcher
from server.models.tokenizer import Tokenizer

FORMATS = ("date", "ipv4", "uuid", "email")
PATTERNS = ("^[0-9]{5}$", "^(ab|cd)+$", "x.?y", r"^\d{1,3}(\.\d{1,3}){3}$", "[A-Z][a-z]*")
NAMES = ("a", "b", "name", "größe", 'say "hi"', "a b", "")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """With definitions that it may refer to, itself among them."""
    schema = _schema(rng, depth)
    if rng.random() < 0.3:
        properties = {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}, "value": _scalar(rng)}
        node = {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}
        return {"$defs": {"node": node}, "type": "array", "prefixItems": [schema], "items": {"$ref": "#/$defs/node"}}
    return schema


def random_parameters(rng: random.Random) -> dict[str, Any]:
    """Of a function: an object that lists its properties under names most tool parsers can write."""
    names = [name for name in ("a", "b_1", "name", "größe", "x y") if rng.random() < 0.5]
    return {
        "type": "object",
        "properties": {name: _schema(rng, 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_scalar, _scalar, _enum]
    if depth < 4:
        kinds += [_object, _object, _array, _any_of, _all_of]
    return rng.choice(kinds)(rng, depth)


def _scalar(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.choice(["string", "string", "integer", "number", "boolean", "null", "mixed"])
    if kind == "mixed":
        return {"type": rng.sample(["string", "integer", "boolean", "null"], 2)}
    schema: dict[str, Any] = {"type": kind}
    if kind == "string":
        how = rng.random()
        if how < 0.3:
            schema["minLength"] = rng.randrange(4)
            schema["maxLength"] = schema["minLength"] + rng.randrange(8)
        elif how < 0.5:
            schema["pattern"] = rng.choice(PATTERNS)
        elif how < 0.7:
            schema["format"] = rng.choice(FORMATS)
    if kind in ("integer", "number"):
        low = rng.randrange(-1000, 1000)
        schema |= rng.choice(
            [
                {}, {"minimum": low}, {"maximum": low}, {"minimum": low, "maximum": low + rng.randrange(50)},
                {"exclusiveMinimum": low, "exclusiveMaximum": low + 5}, {"multipleOf": rng.choice([2, 7, 25])},
            ]
        )  # fmt: skip
    return schema


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [1, -2.5, "x", "größe", True, None, [1, "a"], {"k": [None]}, 'quo"te\\', "😀"]
    return {"const": rng.choice(values)} if rng.random() < 0.4 else {"enum": rng.sample(values, rng.randrange(1, 5))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(len(NAMES)))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _schema(rng, depth + 1) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.7:
        schema["additionalProperties"] = False if rng.random() < 0.7 else _scalar(rng)
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _schema(rng, depth + 1)}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randrange(3)
        schema["maxItems"] = schema["minItems"] + rng.randrange(3)
    if rng.random() < 0.3:
        schema["prefixItems"] = [_schema(rng, depth + 1) for _ in range(rng.randrange(1, 3))]
    return schema


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, 2)
    parts = [{"type": "object", "properties": {name: _scalar(rng)}, "required": [name]} for name in names]
    return {"allOf": parts}


# --- drawing ------------------------------------------------------------------------------------------------------


class Writer:
    """Draws at random, and after `patience` tokens whatever ends the text soonest, as far as one can tell from a token."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int], rng: random.Random, patience: int = 60) -> None:
        self._rng = rng
        self._ends = ends
        self._patience = patience
        self.closers = [
            *ends,
            *(tokenizer.encode(text, add_special_tokens=False)[-1] for text in '"yx}]),Z0123456789.:-@+tfnc'),
        ]

    def next(self, mask: bytes, num_drawn: int) -> int:
        allowed = [8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        assert allowed
        if num_drawn >= self._patience:
            closers = [token for token in self.closers if token in allowed]
            if closers:
                return closers[0] if closers[0] in self._ends or num_drawn % 3 else self._rng.choice(closers)
        return self._rng.choice(allowed)

    def write(self, matcher: TokenMatcher, limit: int = 2000) -> list[int]:
        """Without the end token."""
        ids: list[int] = []
        while len(ids) < limit:
            mask = matcher.allowed()
            assert mask is not None
            token = self.next(bytes(mask), len(ids))
            if token in self._ends:
                return ids
            matcher.accept(token)
            ids.append(token)
        raise AssertionError(f"no end after {limit} tokens")
