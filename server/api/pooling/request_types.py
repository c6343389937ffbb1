"""Request types of the pooling routes, with the limits of each field: OpenAI's embeddings with vLLM's fields, and vLLM's own
routes. Cohere's types are in `cohere.py`.

Unsupported fields are rejected by name (`server/http/schema.py`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct

from runtime.api import PoolingTask
from server.api.openai.conversation_types import Messages, TurnFields
from server.http.errors import InvalidRequest
from server.http.schema import INT64, Name, RequestId, TokenId, Wire
from server.http.wire_fields import QueueFields, TruncationFields

MAX_TOKENS = Annotated[int, Meta(ge=0, le=INT64)]  # 0: as many as there are
Content = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class PoolingFields(TruncationFields, QueueFields, kw_only=True):
    """Fields shared by all pooling routes. None means the default of the model or route. By default, truncation removes the end."""

    model: Name | None = None
    use_activation: bool | None = None  # normalise embeddings; softmax or sigmoid of a head's numbers
    request_id: RequestId | None = None  # in place of X-Request-Id, which wins
    user: str | None = None  # harmless: it describes the caller

    def check(self) -> None:
        """Raise InvalidRequest if fields contradict each other."""
        self.check_truncation()


class InputFields(PoolingFields, TurnFields, kw_only=True):
    """Fields of /v1/embeddings, /classify and /pooling: either `input` or a conversation."""

    input: Content | None = None
    messages: Messages | None = None

    def check(self) -> None:
        super().check()
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("give either input or messages", param="input")
        if self.messages is None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
                if getattr(self, name):
                    raise InvalidRequest(f"{name} is only allowed with messages", param=name)
        self.check_messages(self.messages or ())


class EmbeddingsRequest(InputFields, kw_only=True):
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    prompt_name: Name | None = None  # of the model's own (sentence-transformers): it stands before each text


class ClassifyRequest(InputFields, kw_only=True):
    pass


class PoolingRequest(EmbeddingsRequest, kw_only=True):
    task: PoolingTask | None = None  # None: what the model is served for


# --- two texts ----------------------------------------------------------------------------------------------------


class TextPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class TextObject(Struct, kw_only=True, forbid_unknown_fields=True):
    """Document as a JSON object with the key `text` (Jina, Cohere) or `content` (vLLM)."""

    text: str | None = None
    content: Annotated[list[TextPart], Meta(min_length=1, max_length=1)] | None = None

    def written(self, where: str) -> str:
        """Return the document's text. `where`: field name for errors. Raises InvalidRequest if the object has no text."""
        if (self.text is None) == (self.content is None):
            raise InvalidRequest(f"{where} has no text", param=f"{where}.text")
        return self.content[0].text if self.content is not None else cast("str", self.text)


ScoreText = str | TextObject
ScoreTexts = str | TextObject | Annotated[list[ScoreText], Meta(min_length=1)]


def written(given: ScoreText, where: str) -> str:
    return given if isinstance(given, str) else given.written(where)


def texts_written(given: ScoreTexts, where: str) -> list[tuple[str, str]]:
    """Return (text, field name) for each text of the field `where`. Raises InvalidRequest."""
    if not isinstance(given, list):
        return [(written(given, where), where)]
    return [(written(each, f"{where}[{number}]"), f"{where}[{number}]") for number, each in enumerate(given)]


class ComparingFields(PoolingFields, kw_only=True):
    max_tokens_per_query: MAX_TOKENS | None = None
    max_tokens_per_doc: MAX_TOKENS | None = None
    instruction: str | None = None  # of a model whose prompt has a place for one


_PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


class ScoreRequest(ComparingFields, kw_only=True):
    """Body of a score request. One pair of fields is used: text_1 and text_2, data_1 and data_2, or queries with documents or
    items. Both fields have equally many texts, or the first field has one text."""

    text_1: ScoreTexts | None = None
    text_2: ScoreTexts | None = None
    data_1: ScoreTexts | None = None
    data_2: ScoreTexts | None = None
    queries: ScoreTexts | None = None
    documents: ScoreTexts | None = None
    items: ScoreTexts | None = None

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of the two fields that are set. Raises InvalidRequest unless they form a pair."""
        given = {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}
        for pair in _PAIRS:
            if given == {*pair}:
                return pair
        raise InvalidRequest(
            "give text_1 and text_2, or data_1 and data_2, or queries and documents, or queries and items",
            param="text_1",
        )

    def check(self) -> None:
        super().check()
        _ = self.names


class RerankRequest(ComparingFields, kw_only=True):
    query: ScoreText
    documents: Annotated[list[ScoreText], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0, le=INT64)] | None = None  # 0: all
    return_documents: bool | None = None


# --- known and not implemented ------------------------------------------------------------------------------------

_REFUSED: dict[str, tuple[Any, ...]] = {
    "padding": ("do_not_pad",),
    "mm_processor_kwargs": (),
    "normalize": (),
    "softmax": (),
    "activation": (),
}
_OF_INPUTS = _REFUSED | {"chat_template": (), "media_io_kwargs": ()}
_OF_VECTORS = _OF_INPUTS | {"embed_dtype": ("float32",), "endianness": ("native", "little"), "late_chunking_params": ()}
_OF_PAIRS = _REFUSED | {"rank_fields": ([], ["text"]), "max_chunks_per_doc": ()}
_REPLACED = dict.fromkeys(("normalize", "softmax", "activation"), "use_activation")

EMBEDDINGS: Wire[EmbeddingsRequest] = Wire(EmbeddingsRequest, _OF_VECTORS, replaced=_REPLACED)
CLASSIFY: Wire[ClassifyRequest] = Wire(ClassifyRequest, _OF_INPUTS, replaced=_REPLACED)
POOLING: Wire[PoolingRequest] = Wire(PoolingRequest, _OF_VECTORS, replaced=_REPLACED)
SCORE: Wire[ScoreRequest] = Wire(ScoreRequest, _OF_PAIRS, replaced=_REPLACED)
RERANK: Wire[RerankRequest] = Wire(RerankRequest, _OF_PAIRS, {"max_chunks_per_doc"}, _REPLACED)
