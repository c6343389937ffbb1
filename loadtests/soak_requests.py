"""Requests of a soak test, and a check of each answer. The requests are an endless random mixture of APIs, lengths, formats,
disconnecting clients and invalid bodies. This module sends nothing itself."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WORDS = [
    "the",
    "a",
    "lighthouse",
    "keeper",
    "climbed",
    "stairs",
    "slowly",
    "while",
    "rain",
    "fell",
    "on",
    "seven",
    "grey",
    "boats",
    "and",
    "nobody",
    "counted",
    "them",
]
BAD_BODIES: tuple[tuple[str, bytes], ...] = (
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b'{"messages":[]}'),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}],"temperature":99}'),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}],"tools":[null]}'),
    ("/v1/chat/completions", b'{"messages":"\xff\xfe"}'),
    ("/v1/completions", b'{"prompt":"x","max_tokens":-1}'),
    ("/v1/completions", b'{"prompt":"x","n":100000}'),
    ("/v1/completions", b'{"prompt":"x","zz":' + b'{"a":' * 2000 + b"1" + b"}" * 2001),
    ("/v1/completions", b'{"prompt":[1,2,99999999]}'),
    ("/v1/completions", json.dumps({"prompt": "word " * 20_000}).encode()),
    ("/v1/completions", b'{"prompt":"x","structured_outputs":{"regex":"("}}'),
    ("/v1/completions", b'{"prompt":"x","response_format":{"type":"json_schema","json_schema":{"schema":{"type":7}}}}'),
    ("/v1/responses", b'{"input":7}'),
    ("/v1/responses", b'{"input":"x","previous_response_id":"resp_none"}'),
    ("/v1/messages", b'{"model":"MODEL","max_tokens":0,"messages":[]}'),
    ("/v1/messages", b'{"model":"MODEL","max_tokens":5,"messages":[{"role":"user","content":"x"}],"tools":[1]}'),
    ("/no/such/path", b"{}"),
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LAST_WORDS = {
    "/v1/chat/completions": b"data: [DONE]",
    "/v1/completions": b"data: [DONE]",
    "/v1/responses": b'"type":"response.',
    "/v1/messages": b'"type":"message_stop"',
}


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """Request of a soak test. `kind`: name in the report. `num_choices`: number of sequences that it starts. `leaves_after`:
    bytes of the answer after which the client disconnects, or None. `is_bad`: whether the server must refuse it."""

    kind: str
    path: str
    body: bytes
    streams: bool = False
    num_choices: int = 1
    leaves_after: int | None = None
    is_bad: bool = False


def requests(seed: int, model: str, max_words: int) -> Iterator[SoakRequest]:
    """Yield requests without end. The same seed yields the same requests."""
    draw = random.Random(seed)
    while True:
        if draw.random() < 0.1:
            path, body = draw.choice(BAD_BODIES)
            yield SoakRequest("bad", path, body.replace(b"MODEL", model.encode()), is_bad=True)
            continue
        path = draw.choice(tuple(LAST_WORDS))
        streams = draw.random() < 0.7
        body, num_choices, form = _body(draw, path, model, max_words)
        leaves_after = draw.randrange(1, 3000) if draw.random() < 0.2 else None
        kind = f"{path.removeprefix('/v1/')}{' stream' if streams else ''}{form}{' leaves' if leaves_after else ''}"
        body["stream"] = streams
        yield SoakRequest(kind, path, json.dumps(body).encode(), streams, num_choices, leaves_after)


def _body(draw: random.Random, path: str, model: str, max_words: int) -> tuple[dict[str, Any], int, str]:
    """Return a request body without the field `stream`, its number of sequences, and its kind."""
    num_words = int(2 ** draw.uniform(1, max(2, max_words.bit_length() - 1)))  # many short, few long
    text = " ".join(draw.choices(WORDS, k=num_words))
    if draw.random() < 0.3:
        text = "A beginning that many share, so that it is found in the prefix cache. " * 6 + text
    max_tokens = int(2 ** draw.uniform(0, 7.5))
    body: dict[str, Any] = {"model": model, "temperature": draw.choice([0, 0.7, 1]), "top_p": draw.choice([0.9, 1])}
    messages = [{"role": "user", "content": text}]
    if path == "/v1/messages":
        return body | {"messages": messages, "max_tokens": max_tokens}, 1, ""
    if path == "/v1/responses":
        return body | {"input": text, "max_output_tokens": max(16, max_tokens), "store": draw.random() < 0.5}, 1, ""
    body |= {"prompt": text} if path == "/v1/completions" else {"messages": messages}
    body |= {"max_tokens": max_tokens, "seed": draw.randrange(2**31)}
    special = draw.randrange(8)
    if special == 0:
        body |= {"n": 3}
        return body, 3, " n=3"
    if special == 1:
        form = {"json": SCHEMA} if draw.random() < 0.5 else {"regex": "[a-z]{3,9}(-[0-9]{2}){1,4}"}
        return body | {"structured_outputs": form}, 1, " structured"
    if special == 2:
        return body | {"stop": ["the", "\n"], "frequency_penalty": 0.5, "ignore_eos": True}, 1, " stop"
    if special == 3:
        top = {"logprobs": 3} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 3}
        return body | top, 1, " logprobs"
    return body, 1, ""


def fault_of(request: SoakRequest, status: int, body: bytes) -> str | None:
    """Return an error message if a complete answer is wrong, or None. Status 429 is always correct."""
    if status == 429:
        return None
    if request.is_bad:
        return None if 400 <= status < 500 else f"HTTP {status} for a bad body: {_start(body)}"
    if status != 200:
        return f"HTTP {status}: {_start(body)}"
    if not request.streams:
        try:
            answer = json.loads(body)
        except ValueError:
            return f"not JSON: {_start(body)}"
        return f"an error with HTTP 200: {_start(body)}" if answer.get("error") else None
    if b'"error":{' in body or b"event: error" in body:
        return f"an error event: {_start(body[-400:])}"
    last = body.rstrip().rpartition(b"\n\n")[2]
    return None if LAST_WORDS[request.path] in last else f"the stream did not end: {_start(body[-200:])}"


def _start(body: bytes) -> str:
    return body[:300].decode(errors="replace")
