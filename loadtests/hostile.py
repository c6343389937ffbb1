"""Bodies of expensive requests, grouped by attack. Their cost for a server is much higher than for the sender.

Each body once blocked every stream for seconds, or allocated gigabytes, on some server (including ours)."""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Attack:
    """Attack on a server. `bodies`: request bodies, sent at the same time on separate connections. `leaves_after_s`: seconds
    until the clients disconnect; None lets them wait for the answers."""

    path: str
    bodies: Callable[[], Iterator[bytes]]
    leaves_after_s: float | None = None


def _one(text: Callable[[], str]) -> Callable[[], Iterator[bytes]]:
    return lambda: iter([text().encode()])


def _completion(**fields: object) -> Callable[[], Iterator[bytes]]:
    return _one(lambda: json.dumps({"prompt": "Once upon a time", "max_tokens": 16, **fields}))


def _many(number: int, text: Callable[[int], str]) -> str:
    return ",".join(map(text, range(number)))


def _words(num_chars: int) -> str:
    return ("nobody knows what this is about " * (num_chars // 32 + 1))[:num_chars]


def _schema(number: int) -> bytes:
    """Return a JSON schema of 115 kB, whose compilation takes about half a second. Schemas with other numbers differ."""
    properties = {f"property_{number}_{index}_with_a_long_name": {"type": "string"} for index in range(1800)}
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "guided_json": {"type": "object", "properties": properties},
    }
    return json.dumps(chat).encode()


def _answered_schema(number: int) -> bytes:
    """Return a large valid JSON schema of one of five kinds: properties, choices, a pattern, table rows, alternatives."""
    rng, kind = random.Random(number), number % 5

    def word(num_chars: int = 12) -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=num_chars))

    text, schema = {"type": "string"}, {}
    if kind == 0:
        schema = {"type": "object", "properties": {word(): text for _ in range(300)}}
    elif kind == 1:
        schema = {"enum": [word(30) for _ in range(1500)]}
    elif kind == 2:
        schema = text | {"pattern": "^(" + "|".join(word(8) + "[a-z0-9]{1,20}" for _ in range(60)) + ")$"}
    elif kind == 3:
        cells = {word(): {"type": rng.choice(["string", "number", "integer"])} for _ in range(60)}
        row = {"type": "object", "required": [*cells], "properties": cells, "additionalProperties": False}
        schema = {"type": "array", "items": row, "maxItems": 50}
    else:
        inner = {"type": "object", "properties": {word(): text | {"maxLength": 5 + n} for n in range(5)}}
        schema = {"anyOf": [{"type": "object", "properties": {word(): inner for _ in range(8)}} for _ in range(8)]}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "guided_json": schema}
    return json.dumps(chat).encode()


def _tool(number: int) -> dict[str, object]:
    properties = {f"p{number}_{index}": {"type": "string", "description": _words(100)} for index in range(20)}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": f"tool{number}", "parameters": parameters}}


def _png(width: int, height: int, rows: bytes) -> bytes:
    """Return an 8-bit PNG with a declared size of `width` by `height` and pixel data `rows`. A row begins with its filter type."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _seen(*pictures: bytes) -> bytes:
    """Return the body of a chat about images."""
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(each).decode()}}
        for each in pictures
    ]
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 4}).encode()


def _noise(side: int, seed: int) -> bytes:
    rng = random.Random(seed)
    return _png(side, side, b"".join(b"\0" + rng.randbytes(side) for _ in range(side)))


ATTACKS: Mapping[str, Attack] = {
    "nothing": Attack(COMPLETIONS, _completion(max_tokens=1)),
    "long-name": Attack(COMPLETIONS, _one(lambda: f'{{"prompt":"hi","max_tokens":1,"{"a" * 15 * MIB}":1}}')),
    "unknown-fields": Attack(COMPLETIONS, _one(lambda: '{"prompt":"hi",' + _many(900_000, lambda i: f'"f{i}":1') + "}")),
    "empty-messages": Attack(
        CHAT, _one(lambda: '{"messages":[' + ",".join(['{"role":"user","content":""}'] * 500_000) + "]}")
    ),
    "some-empty-messages": Attack(
        CHAT, _one(lambda: '{"messages":[' + ",".join(['{"role":"user","content":""}'] * 50_000) + "]}")
    ),
    "template-arguments": Attack(
        CHAT,
        _one(
            lambda: '{"messages":[{"role":"user","content":"Hi"}],"chat_template_kwargs":{'
            + _many(900_000, lambda i: f'"f{i}":1') + "}}"
        ),
    ),
    "metadata": Attack(COMPLETIONS, _one(lambda: '{"prompt":"hi","metadata":{"a":[' + ",".join(["{}"] * 1_200_000) + "]}}")),
    "1024-prompts": Attack(COMPLETIONS, _completion(prompt=[_words(1900)] * 1024)),
    "250-prompts": Attack(COMPLETIONS, _completion(prompt=[f"{i} {_words(1900)}" for i in range(250)], max_tokens=1)),
    "allowed-ids": Attack(
        COMPLETIONS, _completion(prompt=[f"{i}" for i in range(250)], allowed_token_ids=[*range(49_000)], max_tokens=1)
    ),
    "many-tools": Attack(CHAT, _one(lambda: json.dumps({
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "tools": [_tool(number) for number in range(512)],
    }))),
    "long-prompt": Attack(COMPLETIONS, _completion(prompt=_words(15 * MIB))),
    "truncated-prompt": Attack(COMPLETIONS, _completion(prompt=_words(15 * MIB), truncate_prompt_tokens=8)),
    "tokenize-strings": Attack(TOKENIZE, _one(lambda: json.dumps({"prompt": _words(15 * MIB), "return_token_strs": True}))),
    "tokenize-most": Attack(TOKENIZE, _one(lambda: json.dumps({"prompt": _words(MIB), "return_token_strs": True}))),
    "tokenize-rare": Attack(TOKENIZE, _one(lambda: json.dumps({"prompt": "\U00013000" * MIB}, ensure_ascii=False))),
    "tokenize-and-leave": Attack(
        TOKENIZE, lambda: iter([json.dumps({"prompt": _words(2 * MIB)}).encode()] * 8), leaves_after_s=0.3
    ),
    "schemas-and-leave": Attack(CHAT, lambda: map(_schema, range(60)), leaves_after_s=0.5),
    "schemas-answered": Attack(CHAT, lambda: map(_answered_schema, range(40))),
    "picture-bombs": Attack(CHAT, lambda: iter([_seen(_png(60_000, 60_000, bytes(MIB)))] * 32)),
    "large-pictures": Attack(CHAT, lambda: (_seen(_png(7_900, 7_900 - i, bytes(7_901 * (7_900 - i)))) for i in range(8))),
    "pictures": Attack(CHAT, lambda: (_seen(*(_noise(512, 4 * i + k) for k in range(4))) for i in range(16))),
    "pictures-and-leave": Attack(
        CHAT, lambda: (_seen(*(_noise(512, -4 * i - k) for k in range(4))) for i in range(1, 17)), leaves_after_s=0.3
    ),
    "scored-prompt": Attack(COMPLETIONS, _completion(prompt=_words(12_000), prompt_logprobs=20, max_tokens=1)),
    "128-answers": Attack(COMPLETIONS, _completion(n=128)),
    "128-beams": Attack(COMPLETIONS, _completion(n=1, best_of=128, use_beam_search=True)),
}  # fmt: skip
