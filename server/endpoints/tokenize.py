"""POST /tokenize and /detokenize: the same ids and text the generation routes would use."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server import schema
from server.generate.conversation import chat_ids
from server.generate.preprocess import text_ids
from server.generate.sampling import check_token_ids
from server.http.body import json_response, read_request
from server.openai.frames import Json
from server.service import Service


async def tokenize(service: Service, http: Request) -> Response:
    served = service.lifecycle.served()
    wire = await read_request(http, schema.TOKENIZE, service.config)
    served.check_name(wire.model)
    if wire.messages is not None:
        ids = await chat_ids(served, service.offload, wire)
    else:
        special = wire.add_special_tokens is not False
        ids = await text_ids(
            served, service.offload, wire.prompt or "", add_special_tokens=special, param="prompt", fits=False
        )
    body: Json = {"count": len(ids), "max_model_len": served.engine.model.max_model_len, "tokens": ids}
    if wire.return_token_strs:
        body["token_strs"] = served.tokenizer.token_strings(ids)
    return json_response(body)


async def detokenize(service: Service, http: Request) -> Response:
    served = service.lifecycle.served()
    wire = await read_request(http, schema.DETOKENIZE, service.config)
    served.check_name(wire.model)
    check_token_ids(wire.tokens, served.engine.model.vocab_size, "tokens")
    text = await service.offload.run(
        4 * len(wire.tokens), lambda: served.tokenizer.decode(wire.tokens, skip_special_tokens=False)
    )
    return json_response({"prompt": text})
