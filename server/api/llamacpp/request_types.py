"""Request types of llama.cpp's /completion and /infill, with the limits of each field.

Unsupported constraints are rejected by name (`server/http/schema.py`). Unsupported samplers and options of slots are only
reported, because editor plug-ins send them with every request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from server.http.errors import InvalidRequest
from server.http.schema import INT64, MAX_BIASES, MAX_LOGPROBS, Name, TokenId, Wire
from server.http.wire_fields import RepeatFields

MAX_PROMPTS = 1024
MAX_N = 128
MAX_FILES = 1024
RANDOM_SEEDS = (-1, 2**32 - 1)


class PromptObject(Struct, kw_only=True, forbid_unknown_fields=True):
    prompt_string: str
    multimodal_data: list[Any] | None = None


PromptItem = str | TokenId | list[str | TokenId] | PromptObject


class LlamaEmbeddingRequest(Struct, kw_only=True):
    """Body of an embedding request. `content`: one or more prompts as in /completion. `input`: synonym of `content`."""

    model: Name | None = None
    content: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    embd_normalize: Literal[-1, 2] | None = None  # 2, as if not given: to Euclidean length 1; -1: not at all

    def check(self) -> None:
        if (self.content is None) == (self.input is None):
            raise InvalidRequest("give either content or input", param="content")


class ExtraFile(Struct, kw_only=True, forbid_unknown_fields=True):
    text: str
    filename: Name = "tmp"
    time: float | None = None  # when its editor saw it


class LlamaRequest(RepeatFields, kw_only=True):
    """Fields shared by /completion and /infill."""

    model: Name | None = None
    n_predict: Annotated[int, Meta(ge=-2, le=INT64)] | None = None  # less than 0: as many as the context holds
    max_tokens: Annotated[int, Meta(ge=-2, le=INT64)] | None = None  # another name of it
    temperature: Annotated[float, Meta(ge=-1e9, le=2)] | None = None  # less than 0 is greedy, as 0 is
    ignore_eos: bool | None = None
    # Pairs of a token id and a bias, or an object; false for a bias bans the token.
    logit_bias: (
        Annotated[list[tuple[TokenId, float | bool]], Meta(max_length=MAX_BIASES)]
        | Annotated[dict[str, float | bool], Meta(max_length=MAX_BIASES)]
        | None
    ) = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    n_cmpl: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    grammar: str | None = None  # GBNF
    json_schema: dict[str, Any] | bool | None = None
    cache_prompt: bool | None = None  # False: nothing of the prefix cache is used
    stream: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: list[Name] | None = None

    def check(self) -> None:
        if self.grammar and self.json_schema is not None:
            raise InvalidRequest("either json_schema or grammar can be given, but not both", param="grammar")
        if self.grammar and "::=" not in self.grammar:
            raise InvalidRequest("grammar is not GBNF: it has no rule (name ::= …)", param="grammar")
        if None not in (self.n_predict, self.max_tokens) and self.n_predict != self.max_tokens:
            raise InvalidRequest("n_predict and max_tokens contradict each other", param="max_tokens")


class LlamaCompletionRequest(LlamaRequest, kw_only=True):
    prompt: str | PromptObject | Annotated[list[PromptItem], Meta(min_length=1, max_length=1 << 20)]

    def check(self) -> None:
        super().check()
        for prompt in self.prompt if isinstance(self.prompt, list) else [self.prompt]:
            if isinstance(prompt, PromptObject) and prompt.multimodal_data:
                raise InvalidRequest(
                    "prompt.multimodal_data: images and audio are not supported on this route", param="prompt"
                )

    @property
    def is_list(self) -> bool:
        """True if the request has several prompts. The response is then a list. Call `prompts` first."""
        return isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts. Each is a text or a list of token ids. Raises InvalidRequest."""
        given = self.prompt
        if not isinstance(given, list):
            return [_text_or_ids(given)]
        if all(isinstance(item, int) for item in given):
            return [_text_or_ids(given)]
        if len(given) > MAX_PROMPTS:
            raise InvalidRequest(f"{len(given)} prompts; at most {MAX_PROMPTS} in one request", param="prompt")
        if any(isinstance(item, int) for item in given):
            raise _mixed()
        return [_text_or_ids(item) for item in given]


def _text_or_ids(given: Any) -> str | list[int]:
    if isinstance(given, PromptObject):
        return given.prompt_string
    if isinstance(given, list) and not all(isinstance(item, int) for item in given):
        raise _mixed()
    found: str | list[int] = given
    return found


def _mixed() -> InvalidRequest:
    return InvalidRequest("texts and token ids in one prompt are not supported; tokenize the texts", param="prompt")


class LlamaInfillRequest(LlamaRequest, kw_only=True):
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_FILES)] | None = None
    prompt: str | None = None  # how the answer begins


class SlotsQuery(Struct, kw_only=True):
    fail_on_no_slot: Literal[0, 1] | None = None


# --- known and not implemented ------------------------------------------------------------------------------------

# Field: the values that ask for nothing. Null always asks for nothing.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "dynatemp_range": (0, 0.0), "dynatemp_exponent": (1, 1.0), "typical_p": (1, 1.0), "tfs_z": (1, 1.0), "mirostat": (0,),
    "mirostat_tau": (5, 5.0), "mirostat_eta": (0.1,), "dry_multiplier": (0, 0.0), "dry_base": (1.75,), "dry_allowed_length": (2,),
    "dry_penalty_last_n": (0, -1, 64), "dry_sequence_breakers": ([],), "xtc_probability": (0, 0.0), "xtc_threshold": (0.1,),
    "top_n_sigma": (-1, -1.0, 0, 0.0), "adaptive_target": (-1, -1.0), "adaptive_decay": (), "samplers": ([],), "min_keep": (0,),
    "n_keep": (0,), "n_discard": (0,), "n_indent": (0,), "n_cache_reuse": (0,), "id_slot": (-1,), "t_max_predict_ms": (0,),
    "t_max_prompt_ms": (0,), "return_progress": (False,), "sse_ping_interval": (), "penalize_nl": (False,),
    "slot_id": (-1,), "speculative": (),
}  # fmt: skip
_REFUSED: dict[str, tuple[Any, ...]] = _IGNORED | {
    "lora": ([],),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "post_sampling_probs": (False,),
    "backend_sampling": (False,),
    "image_data": ([],),
}
_MAY_BE_IGNORED = frozenset(_IGNORED)

COMPLETION: Wire[LlamaCompletionRequest] = Wire(LlamaCompletionRequest, _REFUSED, _MAY_BE_IGNORED)
INFILL: Wire[LlamaInfillRequest] = Wire(LlamaInfillRequest, _REFUSED, _MAY_BE_IGNORED)
EMBEDDING: Wire[LlamaEmbeddingRequest] = Wire(LlamaEmbeddingRequest, {"image_data": ([],)})
