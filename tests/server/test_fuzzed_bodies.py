"""Bodies that hypothesis makes up, of the fields that there are and values that should not be: an answer or a 4xx, never a 500."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.api.anthropic import request_types as anthropic
from server.api.llamacpp import request_types as llamacpp
from server.api.ollama import request_types as ollama
from server.api.openai import request_types
from server.api.pooling import cohere
from server.api.pooling import request_types as pooling
from server.api.responses.request_types import RESPONSES
from server.http.errors import ApiError
from tests.server.conftest import MESSAGES
from tests.server.test_costly_bodies import ANTHROPIC, BODIES, served

WIRES = {
    "/v1/chat/completions": request_types.CHAT, "/v1/completions": request_types.COMPLETION, "/v1/responses": RESPONSES,
    "/v1/messages": anthropic.MESSAGES, "/v1/messages/count_tokens": anthropic.COUNT, "/tokenize": request_types.TOKENIZE,
    "/detokenize": request_types.DETOKENIZE, "/v1/embeddings": pooling.EMBEDDINGS, "/pooling": pooling.POOLING,
    "/classify": pooling.CLASSIFY, "/score": pooling.SCORE, "/rerank": pooling.RERANK, "/v2/embed": cohere.WIRE,
    "/embedding": llamacpp.EMBEDDING, "/invocations": request_types.COMPLETION,
}  # fmt: skip
# APIs whose errors have shapes of their own.
OTHER_WIRES = {
    "/api/chat": ollama.CHAT, "/api/generate": ollama.GENERATE, "/api/show": ollama.SHOW, "/api/embed": ollama.EMBED,
    "/api/embeddings": ollama.EMBEDDINGS, "/completion": llamacpp.COMPLETION, "/infill": llamacpp.INFILL,
}  # fmt: skip
OTHER_BODIES = {
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "stream": False},
    "/api/generate": {"model": "tiny", "prompt": "Hi", "stream": False},
    "/api/show": {"model": "tiny"},
    "/api/embed": {"model": "tiny", "input": "Hi"},
    "/api/embeddings": {"model": "tiny", "prompt": "Hi"},
    "/completion": {"prompt": "Hi"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
}
ALL_WIRES, ALL_BODIES = WIRES | OTHER_WIRES, BODIES | OTHER_BODIES
TEXTS = st.sampled_from(
    ["", "a", "\0", "é", "<|im_end|>", "{", '{"$ref": "#"}', "auto", "required", "text", "json_object", "a" * 3000, "{{ 1/0 }}"]
)  # fmt: skip
ATOMS = st.none() | st.booleans() | st.sampled_from([0, 1, -1, 2, 2**31, 2**63, 10**400, 0.5, 1e308]) | TEXTS
NAMES = st.sampled_from(
    ["type", "text", "content", "role", "name", "function", "schema", "json_schema", "parameters", "$ref", "properties", "zz"]
)  # fmt: skip
VALUES = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)


def fields_of(path: str) -> list[str]:
    return [info.encode_name for info in msgspec.structs.fields(ALL_WIRES[path]._decoder.type)] + ["zz", "a.b"]


def refusal(wire, body: bytes, ignored: list[str] | None) -> ApiError | None:
    """What the decoder raises; anything but an ApiError goes on."""
    try:
        wire.decode(body, ignored)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("path", ALL_WIRES)
@given(data=st.data())
def test_a_decoder_raises_what_clients_can_read_and_nothing_else(path, data):
    fields = data.draw(st.dictionaries(st.sampled_from(fields_of(path)), VALUES, max_size=4))
    body = json.dumps({**ALL_BODIES[path], **fields}).encode()
    for ignored in (None, []):
        error = refusal(ALL_WIRES[path], body, ignored)
        assert error is None or (400 <= error.status < 500 and len(error.body()) < 2000)


@given(text=st.binary(max_size=60) | st.text('{}[]",:\\u0e1', max_size=60).map(str.encode))
def test_what_is_no_json_is_no_exception_but_an_answer(text):
    for each in ALL_WIRES.values():
        error = refusal(each, text, [])
        assert error is None or error.status == 400


@pytest.fixture(scope="module")
def bodies() -> dict[str, list[dict]]:
    """For each path some dozens of bodies, the same in every run."""
    found: dict[str, list[dict]] = {path: [] for path in ALL_BODIES}

    @given(data=st.data())
    @settings(derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def draw(data):
        for path, drawn in found.items():
            fields = data.draw(st.dictionaries(st.sampled_from(fields_of(path)), VALUES, min_size=1, max_size=2))
            drawn.append({**ALL_BODIES[path], **fields})

    draw()
    return found


@pytest.mark.parametrize("path", ALL_BODIES)
async def test_no_body_is_a_500_and_the_server_goes_on(serve, bodies, path):
    server = await serve("ok", max_model_len=4096, **served(path))
    wanted = [{**body, "stream": False} if "stream" in body else body for body in bodies[path]]
    answers = await asyncio.gather(*(server.post(path, body) for body in wanted))
    for body, answer in zip(bodies[path], answers, strict=True):
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error if path.startswith("/api/") else error["message"], body
            assert (answer.json().get("type") == "error") == (path in ANTHROPIC)
    usual = await server.post(path, ALL_BODIES[path])
    # The tiny tokenizer has no tokens for filling in the middle.
    assert usual.status_code == (400 if path == "/infill" else 200), usual.text
    await server.engine.until(lambda: not server.engine.live)
