"""The OpenAPI document: valid, whole, generated once, and true of what a running server takes and says."""

from __future__ import annotations

import json
import re

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from server.api import openapi
from server.api.operations import health
from server.api.operations import pages as endpoint
from server.api.routes import ROUTES
from server.models.lifecycle import LoadPhase
from tests.server.conftest import MESSAGES
from tests.server.test_tool_calls import TWO
from tests.server.text.tool_samples import TOOLS
from tests.server.tiny import tiny_tokenizer

KEYS = [(False, False), (True, False), (False, True), (True, True)]
BODILESS = (
    "/cancel",
    "/ping",
    "/reset_prefix_cache",
    "/drain",
    "/stop_profile",
    "/sleep",
    "/wake_up",
)  # POSTs that need no body
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def document(user_key: bool = False, admin_key: bool = False) -> dict:
    return json.loads(openapi.document(ROUTES, user_key=user_key, admin_key=admin_key))


def references(node) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


# --- the document -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("user_key", "admin_key"), KEYS)
@pytest.mark.nightly
def test_it_is_openapi_3_1(user_key, admin_key):
    OpenAPIV31SpecValidator(document(user_key, admin_key)).validate()


def test_a_body_that_may_be_left_out_is_described_as_such():
    paths = document()["paths"]
    optional = {
        path
        for path, item in paths.items()
        for one in item.values()
        if one.get("requestBody", {}).get("required") is False
    }
    assert optional == {"/start_profile"}
    schema = paths["/start_profile"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["$ref"].endswith("/StartProfile")


def test_every_route_is_in_it_with_what_goes_in_and_what_comes_out():
    paths = document()["paths"]
    assert {(method.upper(), path) for path, item in paths.items() for method in item} == {
        (route.method, re.sub(r":\w+", "", route.path)) for route in ROUTES
    }
    for path, item in paths.items():
        for method, operation in item.items():
            assert ("requestBody" in operation) == (
                (method == "post" and not path.endswith(BODILESS)) or path == "/api/delete"
            )
            success = "101" if path == "/v1/realtime" else "200"
            assert operation["responses"][success]["content"]
            assert "500" in operation["responses"]
            needed = {parameter["name"] for parameter in operation["parameters"] if parameter.get("in") == "path"}
            assert needed == set(re.findall(r"{(\w+)}", path))


def test_every_reference_leads_somewhere_and_no_two_operations_have_one_id():
    made = document(True, True)
    assert len({route.id for route in ROUTES}) == len(ROUTES)
    for reference in references(made):
        node = made
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def answers_of(path: str, method: str = "POST"):
    """Media types to the types of what that route answers."""
    (found,) = (route.answers for route in ROUTES if (route.method, re.sub(r":\w+", "", route.path)) == (method, path))
    return found


@pytest.mark.parametrize(("user_key", "admin_key"), KEYS)
def test_keys_are_asked_for_where_the_server_asks(user_key, admin_key):
    made = document(user_key, admin_key)
    assert ("securitySchemes" in made["components"]) == (user_key or admin_key)
    for path, kind in (("/v1/models", "user"), ("/metrics", "admin"), ("/health", "open")):
        operation = made["paths"][path]["get"]
        names = {name for need in operation.get("security", []) for name in need}
        if kind == "admin" and admin_key:
            assert names == {"adminBearer", "adminHeader"}
        else:
            assert names == ({"bearer", "header"} if user_key and kind != "open" else set())
        assert names <= set(made["components"].get("securitySchemes", {}))
        assert ("401" in operation["responses"]) == bool(names)
        assert ("403" in operation["responses"]) == (kind == "admin" and admin_key and user_key)


def test_what_an_answer_always_has_is_required_and_what_a_request_may_leave_out_is_not():
    schemas = document()["components"]["schemas"]
    answer = schemas["ChatCompletion"]
    assert {"id", "object", "choices"} <= set(answer["required"])
    assert "prompt_logprobs" not in answer["required"]
    assert not [name for name, described in answer["properties"].items() if "default" in described]
    assert "temperature" not in schemas["ChatRequest"]["required"]


# --- its truth ----------------------------------------------------------------------------------------------------


def described(made: dict, path: str, method: str = "post") -> dict:
    body = made["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    return {**body, "components": made["components"]}


@pytest.mark.parametrize(
    ("path", "body", "good"),
    [
        (CHAT, {"messages": MESSAGES}, True),
        (CHAT, {"messages": MESSAGES, "temperature": 2, "stop": ["a", "b"], "stream": False, "n": None}, True),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, True),
        (CHAT, {"messages": MESSAGES, "temperature": 2.5}, False),
        (CHAT, {"messages": MESSAGES, "stop": ["a"] * 5}, False),
        (CHAT, {"messages": MESSAGES, "seed": "1"}, False),
        (CHAT, {"messages": []}, False),
        (CHAT, {"messages": [{"role": "nobody", "content": "Hi"}]}, False),
        (CHAT, {"messages": [{"role": "user", "content": "Hi", "mood": "good"}]}, False),
        (CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto"}, True),
        (CHAT, {"messages": MESSAGES, "tools": [], "tool_choice": "auto"}, False),
        (CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "perhaps"}, False),
        (CHAT, {}, False),
        (COMPLETIONS, {"prompt": "Hi"}, True),
        (COMPLETIONS, {"prompt": [5, 6]}, True),
        (COMPLETIONS, {"prompt": []}, False),
        (COMPLETIONS, {"prompt": "Hi", "n": 0}, False),
        ("/tokenize", {"prompt": "Hi"}, True),
        ("/tokenize", {"prompt": 5}, False),
        ("/detokenize", {"tokens": [5]}, True),
        ("/detokenize", {"tokens": [-1]}, False),
    ],
)
async def test_the_document_and_the_server_take_the_same_requests(serve, path, body, good):
    server = await serve(max_model_len=8192)
    assert ((await server.post(path, body)).status_code == 200) == good
    assert jsonschema.Draft202012Validator(described(document(), path)).is_valid(body) == good


def assert_whole(body, kind) -> None:
    """`body` is a `kind`, and has nothing in it that `kind` leaves out."""
    assert msgspec.to_builtins(msgspec.convert(body, kind)) == body


async def test_what_the_server_says_is_what_the_document_says(serve):
    server = await serve()
    cases = [
        (await server.chat(n=2), CHAT, "POST"),
        (await server.chat(logprobs=True, top_logprobs=2, return_token_ids=True), CHAT, "POST"),
        (await server.chat(prompt_logprobs=1), CHAT, "POST"),
        (await server.complete(prompt=["a", "b"], stop="lo"), COMPLETIONS, "POST"),
        (await server.complete(logprobs=2, prompt_logprobs=1, echo=True, max_tokens=0), COMPLETIONS, "POST"),
        (await server.complete(logprobs=2, return_token_ids=True), COMPLETIONS, "POST"),
        (await server.post("/tokenize", {"prompt": "a", "return_token_strs": True}), "/tokenize", "POST"),
        (await server.post("/tokenize", {"prompt": "a"}), "/tokenize", "POST"),
        (await server.post("/detokenize", {"tokens": [5]}), "/detokenize", "POST"),
        (await server.http.get("/v1/models"), "/v1/models", "GET"),
        (await server.http.get("/v1/models/tiny"), "/v1/models/{model_id}", "GET"),
        (await server.http.get("/version"), "/version", "GET"),
        (await server.http.get("/health"), "/health", "GET"),
    ]
    for response, path, method in cases:
        assert response.status_code == 200, response.text
        assert_whole(response.json(), answers_of(path, method)["application/json"])


@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
async def test_events_are_what_the_document_says(serve, options):
    server = await serve()
    for path, start in (
        (CHAT, {"messages": MESSAGES}),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}),
        (COMPLETIONS, {"prompt": "Hi"}),
        (COMPLETIONS, {"prompt": "Hi", "logprobs": 1, "return_token_ids": True}),
    ):
        for event in await server.events(path, **start, stream_options=options):
            assert_whole(event, answers_of(path)["text/event-stream"])


async def test_calls_and_reasoning_are_what_the_document_says(serve):
    server = await serve(
        f"<think>Hm.</think>{TWO}",
        speaks=tiny_tokenizer(chat_template="{{ messages }}<think></think>"),
        max_model_len=8192,
    )
    answers = answers_of(CHAT)
    body = (await server.chat(tools=TOOLS)).json()
    assert body["choices"][0]["message"]["tool_calls"]
    assert_whole(body, answers["application/json"])
    for event in await server.events(CHAT, messages=MESSAGES, tools=TOOLS, stream_options={"include_usage": True}):
        assert_whole(event, answers["text/event-stream"])


async def test_health_of_every_phase_is_what_the_document_says(serve):
    server = await serve()
    for phase in LoadPhase:
        server.service.lifecycle.phase = phase
        assert_whole((await server.http.get("/health")).json(), health.Health)


async def test_errors_are_what_the_document_says(serve):
    server = await serve(api_key=("sk",))
    key = {"x-api-key": "sk"}
    for response, path in (
        (await server.chat(), CHAT),
        (await server.post(CHAT, {"messages": []}, headers=key), CHAT),
        (await server.post(CHAT, {"messages": MESSAGES, "model": "x"}, headers=key), CHAT),
        (await server.http.post(CHAT, content=b"{}", headers=key), CHAT),
    ):
        assert_whole(response.json(), openapi.ErrorBody)
        made = document(user_key=True)
        reference = made["paths"][path]["post"]["responses"][str(response.status_code)]["$ref"]
        described = made["components"]["responses"][reference.split("/")[-1]]
        code = response.json()["error"]["code"]
        assert code is None or code in described["description"]


# --- serving it ---------------------------------------------------------------------------------------------------


async def test_it_is_generated_when_first_asked_for_and_never_again(serve, monkeypatch):
    made = []

    def counting(routes, **keys):
        made.append(keys)
        return b"{}"

    endpoint._document.cache_clear()
    monkeypatch.setattr(endpoint.openapi, "document", counting)
    server = await serve(api_key=("sk",), loaded=False)
    assert made == []
    for _ in range(3):
        assert (await server.http.get("/openapi.json", headers={"x-api-key": "sk"})).json() == {}
    assert made == [{"user_key": True, "admin_key": False}]
    endpoint._document.cache_clear()


async def test_the_served_document_is_that_of_all_routes(serve):
    server = await serve(admin_api_key="admin")
    response = await server.http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    assert response.json() == document(admin_key=True)


async def test_the_page_loads_nothing_from_elsewhere(serve):
    server = await serve(loaded=False)
    response = await server.http.get("/docs")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "/openapi.json" in response.text
    assert "http://" not in response.text
    assert "https://" not in response.text
    assert "innerHTML" not in response.text  # what a document says is text, never markup
    assert '<html lang="en">' in response.text
