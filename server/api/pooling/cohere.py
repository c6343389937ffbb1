"""Cohere's embedding routes: /v2/embed, and /v1/embed for older clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.json import encode
from starlette.requests import Request
from starlette.types import ASGIApp

from runtime.api import PoolingTask
from server.api.frames import HOLE, around
from server.api.pooling import api_types
from server.api.pooling.pooled import Parts, pooled_for, read, written
from server.api.pooling.request import PoolRequest, PoolText, check_count
from server.api.pooling.run import PooledInput
from server.api.pooling.vectors import Write, base64_of, binary_of, int8_of, json_of, ubinary_of, uint8_of
from server.api.route import GENERATION_REFUSALS, JSON, Route
from server.api.service import Service
from server.generate.request import Truncation
from server.http.call import call_of, note_ignored, off_loop
from server.http.errors import ContextLengthExceeded, Field, FieldNames, InvalidRequest, TextOnly, clip
from server.http.schema import INT64, Name, Priority, RequestId, Wire
from server.models.pooling import DIMENSIONS, Prompts, ServedPooling

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
WRITE: Mapping[str, Write] = MappingProxyType({
    "float": json_of, "int8": int8_of, "uint8": uint8_of, "binary": binary_of, "ubinary": ubinary_of, "base64": base64_of,
})  # fmt: skip
# Cohere's words for what a text is, and the names under which models keep prompts for that.
_PROMPT_NAMES: Mapping[str, Sequence[str]] = MappingProxyType({
    "search_query": ("search_query", "query", "retrieval.query", "s2p_query"),
    "search_document": ("search_document", "document", "passage", "retrieval.passage"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
})  # fmt: skip
ONE_BIT = ("binary", "ubinary")


class TextContent(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class ImageContent(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    image_url: Any


class MixedInput(Struct, kw_only=True, forbid_unknown_fields=True):
    content: Annotated[list[TextContent | ImageContent], Meta(min_length=1)]


class EmbedRequest(Struct, kw_only=True):
    """Body of Cohere's embedding request. `texts`, or `inputs`: the text parts of each input are joined by line breaks.
    `max_tokens`: maximum number of tokens per text, with special tokens."""

    model: Name | None = None
    texts: list[str] | None = None
    inputs: list[MixedInput] | None = None
    input_type: Name | None = None
    embedding_types: Annotated[list[EmbeddingType], Meta(min_length=1, max_length=6)] | None = None
    output_dimension: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None  # what of a text that is too long goes; END if not given
    max_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None

    def check(self) -> None:
        if (self.texts is None) == (self.inputs is None):
            raise InvalidRequest("give either texts or inputs", param="texts")
        if self.input_type == "image":
            raise TextOnly("input_type", "image", param="input_type")

    @property
    def written_types(self) -> list[str]:
        return list(dict.fromkeys(self.embedding_types or ["float"]))

    @property
    def field(self) -> str:
        return "inputs" if self.texts is None else "texts"

    def written(self) -> list[str]:
        """Return the texts to embed. Raises TextOnly for images."""
        if self.texts is not None:
            return self.texts
        return [_lines(given, f"inputs[{number}]") for number, given in enumerate(self.inputs or ())]


def _lines(given: MixedInput, where: str) -> str:
    lines: list[str] = []
    for number, part in enumerate(given.content):
        if isinstance(part, ImageContent):
            name = f"{where}.content[{number}]"
            raise TextOnly(name, "image_url", param=name)
        lines.append(part.text)
    return "\n".join(lines)


WIRE: Wire[EmbedRequest] = Wire(EmbedRequest, {"images": ([],)})


def of_embed(given: EmbedRequest, served: ServedPooling, context: int) -> tuple[PoolRequest, bool]:
    """Convert a request. Return the PoolRequest, and False if `input_type` has no effect. `context`: maximum tokens of a prompt.

    Raises InvalidRequest."""
    task: PoolingTask = "embed"
    try:
        params = served.params(task, dimensions=given.output_dimension)
    except InvalidRequest as error:
        error.rename(lambda name: "output_dimension" if name == DIMENSIONS else name)
        raise
    width = params.dimensions or served.info.embedding_size
    if width % 8 and {*ONE_BIT} & {*given.written_types}:
        raise InvalidRequest(
            f"embedding_types: {width} dimensions are not a multiple of 8; leave out {' and '.join(ONE_BIT)}",
            param="embedding_types",
        )
    texts = given.written()
    check_count(len(texts), given.field)
    prefix = _prefix(given.input_type, served.prompts)
    truncation = None
    if given.truncate != "NONE":
        num_tokens = -1 if given.max_tokens is None else min(given.max_tokens, context)
        truncation = Truncation(num_tokens, "left" if given.truncate == "START" else "right")
    request = PoolRequest(
        inputs=[PoolText(text, Field(f"{given.field}[{number}]")) for number, text in enumerate(texts)],
        params=params,
        prefix=prefix or "",
        field=given.field,
        truncation=truncation,
        priority=given.priority or 0,
    )
    return request, prefix is not None or given.input_type is None


def _prefix(input_type: str | None, prompts: Prompts) -> str | None:
    """Return the model's prefix for texts of type `input_type`, or None. Raises InvalidRequest for an unknown type."""
    if input_type is None:
        return prompts.text(None, "input_type")
    for name in (input_type, *_PROMPT_NAMES.get(input_type, ())):
        if name in prompts.by_name:
            return prompts.by_name[name]
    if input_type not in _PROMPT_NAMES:
        known = ", ".join(dict.fromkeys([*_PROMPT_NAMES, *prompts.by_name]))
        raise InvalidRequest(f"input_type {clip(input_type)!r} is not one of {known}", param="input_type")
    return None


def check_lengths(given: EmbedRequest, pooled: Sequence[PooledInput]) -> None:
    """Raise ContextLengthExceeded if `truncate` is "NONE" and a text has more than `max_tokens` tokens."""
    if given.truncate != "NONE" or given.max_tokens is None:
        return
    for number, each in enumerate(pooled):
        if each.num_tokens > given.max_tokens:
            name = f"{given.field}[{number}]"
            raise ContextLengthExceeded(
                f"{name} has {each.num_tokens} tokens; max_tokens is {given.max_tokens}", param=name
            )


def embed_parts(given: EmbedRequest, id: str, pooled: Sequence[PooledInput], *, older: bool = False) -> Parts:
    """Yield the response in encoded parts. `older`: if the client requested no types, the embeddings are a plain list of floats."""
    floats = older and given.embedding_types is None
    num_tokens = sum(each.num_tokens for each in pooled)
    hole: Any = HOLE
    answer = api_types.CohereEmbeddings(
        id=id, response_type="embeddings_floats" if floats else "embeddings_by_type", embeddings=hole,
        meta=api_types.CohereMeta.of(num_tokens, api_types.BilledUnits(input_tokens=num_tokens), "1" if older else "2"),
    )  # fmt: skip
    before, after = around(encode(answer))
    yield before, 0
    if floats:
        yield from _vectors(json_of, pooled)
    else:
        for number, name in enumerate(given.written_types):
            yield (b"," if number else b"{") + encode(name) + b":", 0
            yield from _vectors(WRITE[name], pooled)
        yield b"}", 0
    if given.texts is not None:
        yield b',"texts":[', 0
        for index, text in enumerate(given.texts):
            yield (b"," if index else b"") + encode(text), len(text) // 8
        yield b"]", 0
    yield after, 0


def _vectors(write: Write, pooled: Sequence[PooledInput]) -> Parts:
    yield b"[", 0
    for index, each in enumerate(pooled):
        written = write(each.numbers)
        yield (b"," + written if index else written), each.numbers.nbytes // 4
    yield b"]", 0


# --- routes -----------------------------------------------------------------------------------------------------------


NAMES = FieldNames({"truncate_prompt_tokens": "max_tokens"})


async def _embed(older: bool, service: Service, http: Request) -> ASGIApp:
    given, loaded = await read(service, http, WIRE)
    served = loaded.require_pooling("embed")
    context = loaded.engine.model.max_model_len
    request, has_prompt = await off_loop(http, lambda: of_embed(given, served, context))
    note_ignored(http, [] if has_prompt else ["input_type"], service.config)
    with NAMES.spoken():
        id, results = await pooled_for(service, loaded, http, request, prefix="embd-")
    check_lengths(given, results)
    parts = embed_parts(given, id, results, older=older)
    return await written(call_of(http), parts, results, len(given.written_types))


EMBED, OLDER_EMBED = (
    Route(
        partial(_embed, older), "POST", path, id, "Pooling", summary, {JSON: api_types.CohereEmbeddings}, EmbedRequest,
        GENERATION_REFUSALS,
    )
    for path, id, summary, older in (
        ("/v2/embed", "cohereEmbed", "Vectors of texts, as Cohere has it", False),
        (
            "/v1/embed", "cohereEmbedV1", "The same as its older clients have it: without embedding_types a plain list", True,
        ),
    )
)  # fmt: skip
