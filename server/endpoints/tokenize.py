"""POST /tokenize and /detokenize: the same ids and text the generation routes would use."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.errors import Field
from server.generate.conversation import chat_ids
from server.generate.preprocess import PROMPT, text_ids
from server.generate.sampling import check_token_ids
from server.http.body import json_response, read_request
from server.openai import requests, wire
from server.schema import Json
from server.service import Service


async def tokenize(service: Service, http: Request) -> Response:
    served = service.lifecycle.served()
    given = await read_request(http, wire.TOKENIZE, service.config)
    served.check_name(given.model)
    if given.messages is not None:
        ids = await chat_ids(served, service.offload, requests.chat_of(given))
    else:
        special = given.add_special_tokens is not False
        ids = await text_ids(
            served, service.offload, given.prompt or "", add_special_tokens=special, param=PROMPT, fits=False
        )
    body: Json = {"count": len(ids), "max_model_len": served.engine.model.max_model_len, "tokens": ids}
    if given.return_token_strs:
        body["token_strs"] = served.tokenizer.token_strings(ids)
    return json_response(body)


async def detokenize(service: Service, http: Request) -> Response:
    served = service.lifecycle.served()
    given = await read_request(http, wire.DETOKENIZE, service.config)
    served.check_name(given.model)
    check_token_ids(given.tokens, served.engine.model.vocab_size, Field("tokens"))
    text = await service.offload.run(
        4 * len(given.tokens), lambda: served.tokenizer.decode(given.tokens, skip_special_tokens=False)
    )
    return json_response({"prompt": text})
