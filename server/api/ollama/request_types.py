"""Request types of Ollama's API, with the limits of each field.

Unsupported constraints are rejected by name, also in `options`. Fields without effect are reported (`server/http/schema.py`).
Answers are streamed unless `stream` is false."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from server.http.errors import InvalidRequest, UnsupportedParameter, clip
from server.http.schema import INT64, MAX_LOGPROBS, MAX_TOOLS, Name, T, ToolName, Wire, asks_for_nothing
from server.http.wire_fields import RepeatFields

MAX_OPTIONS = 128
LATEST = ":latest"  # the tag of a name that has none

Format = dict[str, Any] | str  # a JSON schema, "json", or "" for none
KeepAlive = float | str
Think = bool | Literal["none", "low", "medium", "high", "max"]


class OllamaOptions(RepeatFields, kw_only=True):
    """Supported fields of Ollama's `options`. `ignored_options` lists fields without effect."""

    num_predict: Annotated[int, Meta(ge=-2, le=INT64)] | None = None  # 0 and less: as many as the context holds
    num_ctx: Annotated[int, Meta(ge=1, le=INT64)] | None = None  # tokens of context; there are as many as there are


_OPTIONS = frozenset(info.encode_name for info in msgspec.structs.fields(OllamaOptions))
# Not Ollama's, but sent to it: they would hold the answer to something.
_CONSTRAINING = frozenset({"grammar", "json_schema", "logit_bias"})
_IDLE: dict[str, tuple[Any, ...]] = {
    "typical_p": (1, 1.0), "tfs_z": (1, 1.0), "mirostat": (0,), "num_keep": (0,), "numa": (False,), "low_vram": (False,),
    "vocab_only": (False,), "logits_all": (False,), "embedding_only": (False,), "use_mlock": (False,),
}  # fmt: skip


class GivenFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    arguments: dict[str, Any] | str = ""
    index: int | None = None


class GivenCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """Tool call of an earlier message. `index` is accepted here and in the function, because Open WebUI sends it here."""

    function: GivenFunction
    index: int | None = None
    id: Name | None = None
    type: Literal["function"] | None = None


class GivenMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[GivenCall] | None = None
    tool_name: Name | None = None  # of the function whose result this is
    tool_call_id: Name | None = None
    name: Name | None = None
    images: list[str] | None = None  # base64


class DescribedFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments
    strict: bool | None = None


class GivenTool(Struct, kw_only=True, forbid_unknown_fields=True):
    function: DescribedFunction
    type: Literal["function"] | None = None


# --- requests -----------------------------------------------------------------------------------------------------


class OllamaRequest(Struct, kw_only=True):
    """Fields shared by /api/chat and /api/generate."""

    model: Name
    stream: bool | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None  # the model stays loaded, whatever this says
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        """True if the client requests that the model be unloaded after the answer."""
        return self.keep_alive == 0 or (isinstance(self.keep_alive, str) and self.keep_alive.strip("0hms. ") == "")

    def check(self) -> None:
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise InvalidRequest(f'format is "json" or a JSON schema, not {clip(self.format)!r}', param="format")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true", param="top_logprobs")


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: list[GivenMessage] = []
    tools: Annotated[list[GivenTool], Meta(max_length=MAX_TOOLS)] | None = None

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages):
            if message.images and message.role not in ("user", "tool"):
                where = f"messages[{index}].images"
                raise InvalidRequest(f"{where} is only allowed with role user or tool", param=where)
            if message.tool_calls and message.role != "assistant":
                where = f"messages[{index}].tool_calls"
                raise InvalidRequest(f"{where} is only allowed with role assistant", param=where)


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None  # what follows the answer, for models that fill in the middle
    system: str | None = None
    raw: bool | None = None  # the prompt is continued as it is, without the chat template
    images: list[str] | None = None  # base64

    def check(self) -> None:
        super().check()
        if self.images and (self.raw or self.suffix):
            raise InvalidRequest("images need a prompt that goes through the chat template", param="images")


class OllamaShowRequest(Struct, kw_only=True):
    model: Name | None = None
    name: Name | None = None  # the older name of `model`
    verbose: bool | None = None  # there is no more to say

    def check(self) -> None:
        if not (self.model or self.name):
            raise InvalidRequest("model is required", param="model")


class OllamaEmbeddingFields(Struct, kw_only=True):
    """Fields shared by /api/embed and /api/embeddings. `options` have no effect on embeddings."""

    model: Name
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None  # the model stays loaded, whatever this says

    def check(self) -> None:
        """Do nothing, because no fields can contradict each other."""


class OllamaEmbedRequest(OllamaEmbeddingFields, kw_only=True):
    input: str | list[str]
    truncate: bool | None = None  # False: what is too long is refused, not cut
    dimensions: Annotated[int, Meta(ge=1, le=INT64)] | None = None


class OllamaEmbeddingsRequest(OllamaEmbeddingFields, kw_only=True):
    """Body of the older route /api/embeddings, with one text. The vector is not normalised."""

    prompt: str


class OllamaManageRequest(Struct, kw_only=True):
    """Body of a request to pull, delete, push, create or copy a model. Only pull and delete are supported."""

    model: Name | None = None
    name: Name | None = None  # the older name of `model`
    stream: bool | None = None
    insecure: bool | None = None

    def check(self) -> None:
        if not (self.model or self.name):
            raise InvalidRequest("model is required", param="model")


# --- known and not implemented ------------------------------------------------------------------------------------

# Field: the values that ask for nothing. Null always asks for nothing.
_REFUSED_BY_BOTH: dict[str, tuple[Any, ...]] = {"truncate": (True,), "shift": (True,), "template": ("",)}
_REFUSED_BY_GENERATE: dict[str, tuple[Any, ...]] = _REFUSED_BY_BOTH | {
    "context": ([],),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
}
_MAY_BE_IGNORED = frozenset({"truncate", "shift"})
_REPLACED = {"context": "messages of /api/chat", "template": "raw"}


class _GivenOptions(Struct):
    options: dict[str, Any] | None = None


class _Wire(Wire[T]):
    """Request decoder that also checks the ignored options."""

    def decode(self, body: bytes, ignored: list[str] | None = None) -> T:
        request = super().decode(body, ignored)
        given = msgspec.json.decode(body, type=_GivenOptions).options or {}
        if len(given) > MAX_OPTIONS:
            raise InvalidRequest(
                f"options has {len(given)} entries; at most {MAX_OPTIONS} are allowed", param="options"
            )
        for name in given.keys() - _OPTIONS:
            if asks_for_nothing(given[name], _IDLE.get(name, ())):
                continue
            if ignored is None or name in _CONSTRAINING:
                instead = "format" if name in ("grammar", "json_schema") else None
                raise UnsupportedParameter(f"options.{clip(name)}", instead=instead)
            ignored.append(f"options.{clip(name)}")
        return request


CHAT: Wire[OllamaChatRequest] = _Wire(OllamaChatRequest, _REFUSED_BY_BOTH, _MAY_BE_IGNORED, _REPLACED)
GENERATE: Wire[OllamaGenerateRequest] = _Wire(OllamaGenerateRequest, _REFUSED_BY_GENERATE, _MAY_BE_IGNORED, _REPLACED)
SHOW: Wire[OllamaShowRequest] = Wire(
    OllamaShowRequest, {"system": ("",), "template": ("",), "options": ({},)}, {"system", "template", "options"}
)
MANAGE: Wire[OllamaManageRequest] = Wire(OllamaManageRequest, {"insecure": (False,)})
EMBED: Wire[OllamaEmbedRequest] = Wire(OllamaEmbedRequest, {})
EMBEDDINGS: Wire[OllamaEmbeddingsRequest] = Wire(OllamaEmbeddingsRequest, {})
