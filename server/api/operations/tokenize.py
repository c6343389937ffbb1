"""Routes POST /tokenize and /detokenize, with the same ids and texts as the generation routes. GET /tokenizer_info returns the
fields of tokenizer_config.json, for clients that tokenise."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai import request_types, requests
from server.api.route import BODY_REFUSALS, JSON, route
from server.api.service import Service
from server.generate.encode import chat_ids, max_tokens_of_text, text_ids
from server.generate.plain_prompts import PIECE, check_ids
from server.generate.request import PROMPT
from server.http.answers import json_response, long_json_response
from server.http.body import read_request
from server.http.call import call_of
from server.http.errors import Field, InvalidRequest
from server.http.offload import Pieces
from server.http.watch import while_waited_for
from server.models import lookup
from server.models.model import LoadedModel

CHARS_PER_ID = 4
TOKENS = Field("tokens")


class TokenizeResponse(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResponse(Struct):
    prompt: str


@route(
    "POST", "/tokenize", "tokenize", "Tokens", "The token ids of a text or a conversation", {JSON: TokenizeResponse},
    request_types.TokenizeRequest, BODY_REFUSALS,
)  # fmt: skip
async def tokenize(service: Service, http: Request) -> Response:
    loaded, call = service.lifecycle.require_model(), call_of(http)
    given = await read_request(http, request_types.TOKENIZE, service.config)
    loaded = await lookup.named(call, loaded, given.model, to_chat=given.messages is not None)
    if given.messages is not None:
        chat = await call.run(call.body_cost, partial(requests.chat_of, given))
        work = chat_ids(loaded, call, chat)
    else:
        special = given.add_special_tokens is not False
        work = text_ids(
            loaded, call, given.prompt or "", add_special_tokens=special, param=PROMPT, fits=False,
            plain=given.allow_special_tokens is False,
        )  # fmt: skip
    ids = await while_waited_for(http.receive, work)
    with_strings = bool(given.return_token_strs)
    return await call.run(CHARS_PER_ID * len(ids), lambda: _ids(loaded, ids, with_strings=with_strings))


def _ids(loaded: LoadedModel, ids: list[int], *, with_strings: bool) -> Response:
    strings = loaded.tokenizer.token_strings(ids) if with_strings else UNSET
    return long_json_response(TokenizeResponse(len(ids), loaded.engine.model.max_model_len, ids, strings))


@route(
    "POST", "/detokenize", "detokenize", "Tokens", "The text of token ids", {JSON: DetokenizeResponse},
    request_types.DetokenizeRequest, BODY_REFUSALS,
)  # fmt: skip
async def detokenize(service: Service, http: Request) -> Response:
    loaded, call = service.lifecycle.require_model(), call_of(http)
    given = await read_request(http, request_types.DETOKENIZE, service.config)
    loaded = await lookup.named(call, loaded, given.model)
    max_tokens = max_tokens_of_text(loaded.engine.model.max_model_len)
    if len(given.tokens) > max_tokens:
        raise InvalidRequest(f"{len(given.tokens)} tokens; at most {max_tokens} are converted to text", param=TOKENS)
    work = call.run_pieces(CHARS_PER_ID * len(given.tokens), _text(loaded, given.tokens))
    return await while_waited_for(http.receive, work)


def _text(loaded: LoadedModel, ids: list[int]) -> Pieces[Response]:
    yield from check_ids(ids, loaded.engine.model.vocab_size, TOKENS)
    detokenizer = loaded.tokenizer.table.detokenizer(skip_special_tokens=False)
    pieces: list[str] = []
    for start in range(0, len(ids), PIECE):
        pieces.append(detokenizer.feed(ids[start : start + PIECE]))
        if start + PIECE < len(ids):
            yield
    return json_response(DetokenizeResponse("".join([*pieces, detokenizer.flush()])))


class TokenizerInfo(Struct):
    """Properties of the model's tokenizer. Special tokens and the chat template are null if the model has none."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    sep_token: str | None
    pad_token: str | None
    cls_token: str | None
    mask_token: str | None


_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@route(
    "GET", "/tokenizer_info", "tokenizerInfo", "Tokens", "Special tokens and chat template", {JSON: TokenizerInfo},
    refusals=(503,),
)  # fmt: skip
async def tokenizer_info(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    named = loaded.tokenizer.named_tokens
    return json_response(
        TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            model_max_length=loaded.engine.model.max_model_len,
            vocab_size=loaded.tokenizer.vocab_size,
            chat_template=loaded.chat_template.source or None,
            **{name: named.get(name) for name in _NAMED},
        )
    )
