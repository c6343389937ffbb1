"""The OpenAPI 3.1 document of the routes, generated: requests from each API's wire types, errors from the tree in
`errors`, answers from the types here.

Answers are written as plain JSON elsewhere, for speed; a test reads what a running server says through the types below, so they
cannot drift apart. A route of the table without an entry in OPERATIONS is an error. Knows nothing of a running server but
which keys it has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from orjson import dumps

from server import errors
from server.anthropic import api_types as answers
from server.anthropic import wire
from server.http.auth import ADMIN_PATHS, OPEN_PATHS
from server.openai import wire as openai_wire
from server.responses import api_types as documented
from server.responses.query import InputItemsQuery, RetrieveQuery
from server.schema import REQUEST_ID, Json
from server.version import __version__

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]

# --- answers ------------------------------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of models that reason


class OneToken(Struct):
    token: str
    logprob: float
    bytes: list[int]


class SampledToken(OneToken):
    top_logprobs: list[OneToken]


class ChatLogprobs(Struct):
    content: list[SampledToken]
    refusal: None


class TextLogprobs(Struct):
    """With `echo` of the prompt's tokens too, of whose first nothing is known."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptToken(Struct):
    logprob: float
    rank: int  # from 1, the most likely
    decoded_token: str


# By token id, the prompt's own and the most likely there; null for the first.
PromptLogprobs = list[dict[str, PromptToken] | None]


class TokenIds(Struct, kw_only=True):
    """With `return_token_ids`; of a stream, the prompt's come once per choice."""

    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Answer(Struct, kw_only=True):
    """What the answers of all generation routes share."""

    id: str
    created: int
    model: str


class Function(Struct):
    name: str
    arguments: str  # a JSON object


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(Struct, kw_only=True):
    """`reasoning_content` is an older name of `reasoning`."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(TokenIds, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(Answer, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The first of a call has its id, type and name; the arguments of all of them, joined, are the call's."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(TokenIds, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatCompletionChunk(Answer, kw_only=True):
    """One server-sent event (`data: …`); the last one is `data: [DONE]`. An error after the first event is an event too."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


class TextChoice(TokenIds, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(Answer, kw_only=True):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage
    system_fingerprint: str


class TextCompletionChunk(Answer, kw_only=True):
    """One server-sent event (`data: …`); the last one is `data: [DONE]`. An error after the first event is an event too."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


class ModelCard(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    type: Literal["model"]  # from here on as Anthropic has it
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool


class TokenizeResponse(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResponse(Struct):
    prompt: str


class Health(Struct):
    """`running` and `waiting` once a model is loaded; `phase` to `unit` while it loads; `reason` when it failed."""

    status: Literal["ok", "loading", "draining", "failed"]
    running: int | UnsetType = UNSET
    waiting: int | UnsetType = UNSET
    reason: str | UnsetType | None = UNSET
    phase: str | UnsetType = UNSET
    done: int | UnsetType = UNSET
    total: int | UnsetType | None = UNSET
    unit: str | UnsetType = UNSET


class Version(Struct):
    version: str


class ErrorDetails(Struct):
    message: str
    type: str
    param: str | None  # the field at fault
    code: str | None


class ErrorBody(Struct):
    error: ErrorDetails


# --- operations ---------------------------------------------------------------------------------------------------

_BODY = (400, 404, 413, 415, 503)
_GENERATION = (*_BODY, 429)
_JSON, _EVENTS, _HTML, _TEXT = "application/json", "text/event-stream", "text/html", "text/plain"


@dataclass(frozen=True, slots=True)
class Operation:
    """`answers`: media type to the type of a successful answer, None for plain text. `refusals`: the statuses of its errors
    beside those every route has. `query`: the type of what stands behind the question mark."""

    id: str
    tag: str
    summary: str
    answers: Mapping[str, Any]
    request: Any = None
    refusals: tuple[int, ...] = ()
    error: Any = ErrorBody
    query: Any = None


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/"): Operation("chatPage", "Pages", "The built-in chat page", {_HTML: None}),
    ("POST", "/v1/chat/completions"): Operation(
        "createChatCompletion", "Generation", "Answer a conversation; with `stream`, as server-sent events",
        {_JSON: ChatCompletion, _EVENTS: ChatCompletionChunk}, openai_wire.ChatRequest, _GENERATION,
    ),
    ("POST", "/v1/completions"): Operation(
        "createCompletion", "Generation", "Continue one or several prompts; with `stream`, as server-sent events",
        {_JSON: TextCompletion, _EVENTS: TextCompletionChunk}, openai_wire.CompletionRequest, _GENERATION,
    ),
    ("POST", "/v1/messages"): Operation(
        "createMessage", "Generation", "Answer a conversation, as Anthropic has it; with `stream`, as server-sent events",
        {_JSON: answers.AnthropicMessage, _EVENTS: answers.MessageEvent}, wire.MessagesRequest, _GENERATION, answers.AnthropicError,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "countMessageTokens", "Tokens", "How many tokens a conversation's prompt has, as Anthropic has it",
        {_JSON: answers.InputTokens}, wire.CountRequest, _BODY, answers.AnthropicError,
    ),
    ("POST", "/v1/responses"): Operation(
        "createResponse", "Responses", "Answer a conversation; with `stream`, as server-sent events, with `background`, later",
        {_JSON: documented.Response, _EVENTS: documented.ResponseEvent}, documented.CreateResponse, _GENERATION,
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        "retrieveResponse", "Responses", "A stored response; with `stream`, the events of one in the background",
        {_JSON: documented.Response, _EVENTS: documented.ResponseEvent}, None, (400, 404), RetrieveQuery,
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        "deleteResponse", "Responses", "Forget a stored response; one that is being made is cancelled",
        {_JSON: documented.DeletedResponse}, None, (404,),
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        "cancelResponse", "Responses", "End a response in the background", {_JSON: documented.Response}, None, (400, 404)
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        "listInputItems", "Responses", "What a stored response answers, earlier responses included",
        {_JSON: documented.InputItems}, None, (400, 404), InputItemsQuery,
    ),
    ("GET", "/v1/models"): Operation("listModels", "Models", "The names this server answers to", {_JSON: ModelList}, None, (503,)),
    ("GET", "/v1/models/{model_id}"): Operation(
        "retrieveModel", "Models", "One of those names", {_JSON: ModelCard}, None, (404, 503)
    ),
    ("POST", "/tokenize"): Operation(
        "tokenize", "Tokens", "The token ids of a text or a conversation", {_JSON: TokenizeResponse},
        openai_wire.TokenizeRequest, _BODY,
    ),
    ("POST", "/detokenize"): Operation(
        "detokenize", "Tokens", "The text of token ids", {_JSON: DetokenizeResponse}, openai_wire.DetokenizeRequest, _BODY
    ),
    ("GET", "/health"): Operation("health", "Server", "200 while requests may enter and are worked on", {_JSON: Health}),
    ("GET", "/metrics"): Operation("metrics", "Server", "Counters in Prometheus' text format", {_TEXT: None}),
    ("GET", "/version"): Operation("version", "Server", "The server's version", {_JSON: Version}),
    ("GET", "/openapi.json"): Operation("openapi", "Pages", "This document", {_JSON: Json}),
    ("GET", "/docs"): Operation("docsPage", "Pages", "This document as a page", {_HTML: None}),
}  # fmt: skip

PARAMETERS: Mapping[str, str] = {
    "model_id": "A name of a model, slashes included",
    "response_id": "The id of a response",
}


# --- the document -------------------------------------------------------------------------------------------------


def document(routes: Iterable[tuple[str, str]], *, user_key: bool, admin_key: bool) -> bytes:
    """The document of `routes` (method and path as Starlette spells it), as JSON. Which keys the server has decides what
    the operations need. Raises KeyError for a route OPERATIONS does not know."""
    schemas, components = _schemas()
    paths: dict[str, Json] = {}
    refused: set[tuple[int, Any]] = set()
    for method, route in routes:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route)
        operation = OPERATIONS[method, path]
        refusals = _refusals(operation, path, user_key=user_key, admin_key=admin_key)
        refused |= {(status, operation.error) for status in refusals}
        paths.setdefault(path, {})[method.lower()] = _operation(
            operation, path, schemas, sorted(refusals), _security(path, user_key=user_key, admin_key=admin_key)
        )
    components_used: Json = {
        "schemas": components,
        "responses": {
            _name_of(status, kind): _refusal(status, schemas[kind], with_codes=kind is ErrorBody)
            for status, kind in sorted(refused, key=lambda each: (each[0], each[1].__name__))
        },
        "parameters": {"RequestId": _REQUEST_ID},
        "headers": _HEADERS,
    }
    if schemes := _security_schemes(user_key=user_key, admin_key=admin_key):
        components_used["securitySchemes"] = schemes
    return dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "oneloop", "version": __version__, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
            "servers": [{"url": "/"}],
            "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for operation in OPERATIONS.values())],
            "paths": paths,
            "components": components_used,
        }
    )  # fmt: skip


def _schemas() -> tuple[dict[Any, Json], Json]:
    """A reference for every type that crosses the wire, and what the references name."""
    types = [
        kind
        for operation in OPERATIONS.values()
        for kind in (operation.request, *operation.answers.values())
        if kind is not None and kind is not Json
    ]
    types = list(dict.fromkeys([*types, *(operation.error for operation in OPERATIONS.values())]))
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    return dict(zip(types, references, strict=True)), components


def _operation(
    operation: Operation, path: str, schemas: Mapping[Any, Json], refusals: list[int], security: list[Json] | None
) -> Json:
    made: Json = {"operationId": operation.id, "tags": [operation.tag], "summary": operation.summary}
    if security is not None:
        made["security"] = security
    names = re.findall(r"{(\w+)}", path)
    made["parameters"] = [
        *(
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": PARAMETERS[name],
                "schema": {"type": "string"},
            }
            for name in names
        ),
        *_query(operation.query),
        {"$ref": "#/components/parameters/RequestId"},
    ]
    if operation.request is not None:
        made["requestBody"] = {"required": True, "content": {_JSON: {"schema": schemas[operation.request]}}}
    content = {media: {"schema": _schema_of(kind, schemas)} for media, kind in operation.answers.items()}
    headers = ["X-Request-Id"] if operation.request is None else ["X-Request-Id", "X-Ignored-Fields"]
    responses: Json = {"200": {"description": "OK", "headers": _references(headers), "content": content}}
    if operation.id == "health":
        responses["503"] = {**responses["200"], "description": "Requests may not enter"}
    responses |= {
        str(status): {"$ref": f"#/components/responses/{_name_of(status, operation.error)}"} for status in refusals
    }
    made["responses"] = responses
    return made


def _query(kind: Any) -> Iterator[Json]:
    """The fields of `kind` as parameters."""
    if kind is not None:
        (schema,) = msgspec.json.schema(kind)["$defs"].values()
        for name, described in schema["properties"].items():
            yield {"name": name, "in": "query", "required": False, "schema": described}


def _schema_of(kind: Any, schemas: Mapping[Any, Json]) -> Json:
    if kind is None:
        return {"type": "string"}
    return {"type": "object"} if kind is Json else schemas[kind]


_REQUEST_ID: Json = {
    "name": "X-Request-Id", "in": "header", "required": False, "description": "An id to use instead of a fresh one",
    "schema": {"type": "string", "pattern": f"^{REQUEST_ID}$"},
}  # fmt: skip
_HEADERS: Json = {
    "X-Request-Id": {"description": "The id under which the log has this request", "schema": {"type": "string"}},
    "X-Ignored-Fields": {"description": "Fields of the request that nobody knows", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds to wait before trying again", "schema": {"type": "integer"}},
    "WWW-Authenticate": {"description": "How to show a key", "schema": {"type": "string"}},
}
_HEADERS_OF = {401: ["WWW-Authenticate"], 429: ["Retry-After"], 503: ["Retry-After"]}


def _references(headers: Iterable[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in headers}


def _name_of(status: int, error: Any) -> str:
    phrase = HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "")
    return phrase if error is ErrorBody else f"Anthropic{phrase}"


def _tree(kind: type[errors.ApiError]) -> Iterator[type[errors.ApiError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


def _refusal(status: int, body: Json, *, with_codes: bool) -> Json:
    codes = sorted({kind.code for kind in _tree(errors.ApiError) if kind.status == status and kind.code is not None})
    named = f" (`code`: {', '.join(codes)})" if codes and with_codes else ""
    return {
        "description": HTTPStatus(status).phrase + named,
        "headers": _references(["X-Request-Id", *_HEADERS_OF.get(status, ())]),
        "content": {_JSON: {"schema": body}},
    }


# --- keys ---------------------------------------------------------------------------------------------------------


def _refusals(operation: Operation, path: str, *, user_key: bool, admin_key: bool) -> set[int]:
    found = {*operation.refusals, 500}
    if path in ADMIN_PATHS and admin_key:
        found |= {401, 403} if user_key else {401}
    elif path not in OPEN_PATHS and user_key:
        found.add(401)
    return found


def _security(path: str, *, user_key: bool, admin_key: bool) -> list[Json] | None:
    """What an operation needs, None where there are no keys at all."""
    if not (user_key or admin_key):
        return None
    if path in ADMIN_PATHS and admin_key:
        return [{"adminBearer": []}, {"adminHeader": []}]
    return [{"bearer": []}, {"header": []}] if user_key and path not in OPEN_PATHS else []


def _security_schemes(*, user_key: bool, admin_key: bool) -> Json:
    made: Json = {}
    for exists, names, whose in (
        (user_key, ("bearer", "header"), "A key of --api-key, or the administrator's"),
        (admin_key, ("adminBearer", "adminHeader"), "The key of --admin-api-key"),
    ):
        if exists:
            made[names[0]] = {"type": "http", "scheme": "bearer", "description": whose}
            made[names[1]] = {"type": "apiKey", "in": "header", "name": "x-api-key", "description": whose}
    return made
