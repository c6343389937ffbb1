"""Bodies that cost much to read: what is done about them off the loop, once, and within bounds."""

from __future__ import annotations

import difflib
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http import body, schema
from server.http.body import Excess, excess
from tests.server.conftest import MESSAGES
from tests.server.pooling.embedders import CLASSIFIER, EMBEDDER
from tests.server.test_refusals import error_of

BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "tiny", "max_tokens": 5, "messages": MESSAGES},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": MESSAGES},
    "/invocations": {"prompt": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/embeddings": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/classify": {"input": "Hi"},
    "/score": {"text_1": "Hi", "text_2": "Ho"},
    "/rerank": {"query": "Hi", "documents": ["Ho"]},
    "/v2/embed": {"texts": ["Hi"]},
    "/embedding": {"content": "Hi"},
}
POOLED = {
    "/v1/embeddings": EMBEDDER, "/pooling": EMBEDDER, "/score": EMBEDDER, "/rerank": EMBEDDER, "/v2/embed": EMBEDDER,
    "/embedding": EMBEDDER, "/api/embed": EMBEDDER, "/api/embeddings": EMBEDDER, "/embeddings": EMBEDDER,
    "/classify": CLASSIFIER,
}  # fmt: skip
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")


def served(path: str) -> dict[str, Any]:
    """The options of a server that answers `path`."""
    return {"pooler": POOLED[path]} if path in POOLED else {}


def complaint(path: str, response) -> str:
    """The message of a 400, which has to be in the shape of the path's API."""
    if path not in ANTHROPIC:
        return error_of(response, 400)["message"]
    assert response.status_code == 400, response.text
    assert response.json()["type"] == "error"
    return response.json()["error"]["message"]


async def post_text(server, path: str, text: str | bytes):
    return await server.http.post(path, content=text, headers={"content-type": "application/json"})


# --- where and how often --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_large_bodies_are_decoded_off_the_loop_and_small_ones_where_they_are(serve, monkeypatch, path):
    server = await serve(max_model_len=10_000, **served(path))
    decoded = []
    decode = schema.Wire.decode

    def noted(self, body, ignored=None):
        decoded.append((threading.current_thread() is threading.main_thread(), len(body) > 2000 * body_bytes_per_char))
        return decode(self, body, ignored)

    body_bytes_per_char = body.BYTES_PER_CHAR
    monkeypatch.setattr(schema.Wire, "decode", noted)
    assert (await server.post(path, BODIES[path])).status_code == 200
    await post_text(server, path, json.dumps(BODIES[path]) + " " * 300_000)
    assert decoded == [(True, False), (False, True)]


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_of_very_many_values_is_413_before_any_is_built(serve, monkeypatch, path):
    server = await serve(**served(path))
    monkeypatch.setattr(body, "MAX_VALUES", 1000)
    monkeypatch.setattr(body, "UNCOUNTED_BYTES", 0)
    assert (await server.post(path, BODIES[path])).status_code == 200
    monkeypatch.setattr(schema.Wire, "decode", None)
    refused = await server.post(path, {**BODIES[path], "metadata": {"a": [{}] * 1000}})
    assert refused.status_code == 413
    assert "1000 JSON values" in refused.text


async def test_commas_and_brackets_in_a_text_are_no_values(serve, monkeypatch):
    server = await serve(max_model_len=10_000)
    monkeypatch.setattr(body, "MAX_VALUES", 100)
    monkeypatch.setattr(body, "UNCOUNTED_BYTES", 0)
    assert (await server.complete(prompt='[{"a", \\"b\\"},\\\\' * 100)).status_code == 200


JSON = st.recursive(
    st.none() | st.integers() | st.text('ab"\\,{}[]é') | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\,{'), inner, max_size=4),
    max_leaves=30,
)


def count(value) -> int:
    inside = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    names = body.NAME_VALUES * len(value) if isinstance(value, dict) else 0
    return 0 if inside is None else names + body.INSIDE_VALUES + max(0, len(inside) - 1) + sum(map(count, inside))


@given(value=JSON, piece_bytes=st.integers(1, 20))
def test_values_are_counted_whatever_the_strings_hold_and_wherever_a_text_is_cut(value, piece_bytes):
    text = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "PIECE_BYTES", piece_bytes)
        assert excess(text, count(value), len(text)) is None
        assert count(value) == 0 or excess(text, count(value) - 1, len(text)) is Excess.VALUES


def longest_name(value) -> int:
    inside = value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else []
    names = [len(json.dumps(name)) - 2 for name in value] if isinstance(value, dict) else []
    return max([*names, *map(longest_name, inside)], default=0)


@given(
    value=JSON,
    long=st.text('a"\\,{:', min_size=20, max_size=60),
    piece_bytes=st.integers(1, 8),
    indent=st.none() | st.just(9),
)
def test_a_name_that_is_too_long_is_seen_wherever_a_text_is_cut(value, long, piece_bytes, indent):
    text = json.dumps(
        [long, {"b": long, "a" * 40: value, "c": [long]}], indent=indent, separators=(",", " : ")
    ).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "PIECE_BYTES", piece_bytes)
        assert excess(text, len(text) * 16, 39 - piece_bytes) is Excess.NAME
        assert excess(text, len(text) * 16, max(40, longest_name(value)) + 2 * piece_bytes) is None


async def test_a_name_of_megabytes_is_413_before_anything_is_built_of_it(serve, monkeypatch):
    server = await serve()
    monkeypatch.setattr(schema.Wire, "decode", None)
    for text in ('{"%s": 1, "prompt": "Hi"}', '{"prompt": "Hi", "metadata": {"a": [{"%s"\n: 1}]}}'):
        refused = await post_text(server, "/v1/completions", text % ("n" * 400_000))
        assert refused.status_code == 413
        assert refused.json()["error"]["message"] == "A name in the request body has more than 65536 bytes"


# --- fields nobody knows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_a_name_longer_than_any_fields_is_compared_with_none(serve, monkeypatch, path):
    compared = []
    nearest = difflib.get_close_matches

    def noted(name, *args, **more):
        compared.append(len(name))
        return nearest(name, *args, **more)

    monkeypatch.setattr(difflib, "get_close_matches", noted)
    lenient, strict = await serve(**served(path)), await serve(strict_fields=True, **served(path))
    given = {**BODIES[path], "a" * 50_000: 1}
    answered = await lenient.post(path, given)
    assert answered.status_code == 200
    assert answered.headers["x-ignored-fields"] == "a" * 64
    assert len(complaint(path, await strict.post(path, given))) < 300
    assert not [length for length in compared if length > schema.MAX_GUESSED_CHARS]


async def test_a_field_with_a_letter_too_many_is_still_guessed(serve):
    server = await serve(strict_fields=True)
    assert "did you mean temperature" in error_of(await server.chat(temperatures=1), 400)["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_very_many_unknown_fields_are_refused_by_the_first_without_a_look_at_the_others(serve, path):
    server = await serve(**served(path))
    given = {**BODIES[path], **{f"unknown{number}": None for number in range(5000)}}
    message = complaint(path, await server.post(path, given))
    assert "unknown0 " in message
    assert "65536 bytes" in message
    few = await server.post(path, {**BODIES[path], **{f"unknown{number}": None for number in range(30)}})
    assert few.status_code == 200
    assert few.headers["x-ignored-fields"].startswith("unknown0, unknown1, ")


@pytest.mark.parametrize("depth", [800, 1000, 20_000])
@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_field_of_any_depth_is_the_clients_fault(serve, path, depth):
    server = await serve(**served(path))
    deep = '{"a":' * depth + "1" + "}" * depth
    response = await post_text(server, path, json.dumps(BODIES[path])[:-1] + f', "zz": {deep}}}')
    assert response.status_code == 200 if depth == 800 else "too deeply" in complaint(path, response)


@pytest.mark.parametrize("name", ["a.b", "a\\nb", "messages[0]"])
async def test_odd_names_of_unknown_fields_are_ignored_like_others(serve, name):
    server = await serve()
    response = await post_text(server, "/v1/completions", f'{{"prompt":"Hi","{name}":1}}')
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"]


@pytest.mark.parametrize("tools", [[None], [1], ["a"], [[]], [{}], [{"type": []}], {"a": 1}, [{"type": "x" * 10_000}]])
@pytest.mark.parametrize("path", ANTHROPIC)
async def test_tools_that_are_none_are_the_clients_fault(serve, path, tools):
    server = await serve()
    assert len(complaint(path, await server.post(path, {**BODIES[path], "tools": tools}))) < 500


@pytest.mark.parametrize("path", ANTHROPIC)
async def test_broken_tools_before_something_deep_are_the_clients_fault(serve, path):
    server = await serve()
    deep = "[" * 5000 + "]" * 5000
    text = json.dumps(BODIES[path])[:-1] + f', "tools": [null], "zz": {deep}}}'
    complaint(path, await post_text(server, path, text))
