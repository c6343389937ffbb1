"""GET /tokenizer_info: what a client needs to use /tokenize and /detokenize as its tokenizer. vLLM's path and fields, which are
those of a tokenizer_config.json."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from server.api.route import JSON, Operation, route
from server.api.service import Service
from server.http.answers import json_response


class TokenizerInfo(Struct):
    """Special tokens the tokenizer lacks are null, and so is the chat template of a model without."""

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
    "GET",
    "/tokenizer_info",
    Operation("tokenizerInfo", "Tokens", "Special tokens and chat template", {JSON: TokenizerInfo}, refusals=(503,)),
)
async def tokenizer_info(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    named = loaded.tokenizer.named_tokens
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": loaded.engine.model.max_model_len,
            "vocab_size": loaded.tokenizer.vocab_size,
            "chat_template": loaded.chat_template.source or None,
            **{name: named.get(name) for name in _NAMED},
        }
    )
