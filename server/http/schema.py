"""Wire types shared by APIs, and decoding of bodies: the fields that clients may send, with their limits.

Each field is declared once, in one line. A refusal table lists the fields of OpenAI or vLLM that are not supported, with values
that are equivalent to leaving the field out. All other values are rejected with the field's name. Unknown fields are rejected, or
returned to the decoder's caller, which informs the client. Only fields that are harmless by definition are ignored (`user`,
`metadata` …).

The decoder rejects NaN, infinity and overflowing numbers, so ranges are complete checks. This module does not depend on models:
`generate` checks vocabulary, context length and defaults."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from server.http.errors import InvalidRequest, TextOnly, UnknownParameter, UnreadableBody, UnsupportedParameter, clip

MAX_STOPS = 4
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_TOOLS = 512
INT64 = 2**63 - 1

OTHER_LENGTHS = ("max_new_tokens", "num_predict", "max_output_tokens")  # other servers' names of max_tokens
Json = dict[str, Any]  # an object that goes out

REQUEST_ID = r"[A-Za-z0-9_.:/+=@-]{1,128}"  # anything else could forge log lines or headers

Name = Annotated[str, Meta(max_length=1024)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
TokenId = Annotated[int, Meta(ge=0, le=INT64)]
RequestId = Annotated[str, Meta(pattern=f"^{REQUEST_ID}$")]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_TIMEOUT_S = 86_400
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]  # seconds
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


# --- structured outputs -------------------------------------------------------------------------------------------


class AnyText(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonObject(
    Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag="json_object"
):
    """Response format "JSON object". `schema`: JSON schema of the object, as in llama.cpp."""

    schema: dict[str, Any] | None = None


_STYLE = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """Constraint of the output. Exactly one of the first six fields is set. `json` and `structural_tag` may also be JSON text."""

    json: dict[str, Any] | str | bool | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None

    @property
    def kinds_given(self) -> list[str]:
        """Names of the constraints (first six fields) that are set."""
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        return [
            kind for kind in kinds if getattr(self, kind) not in ((None, False) if kind == "json_object" else (None,))
        ]

    @property
    def is_style(self) -> bool:
        """True if this object only sets the JSON style of a constraint that is in another request field."""
        return not self.kinds_given and any(getattr(self, name) is not None for name in _STYLE)

    def check(self, where: str, prefix: str) -> None:
        """Raise InvalidRequest for contradicting fields. `where`: path of this object. `prefix`: text before its field names."""
        kinds_given = self.kinds_given
        if len(kinds_given) != 1 and not self.is_style:
            found = (
                f"there are {' and '.join(prefix + name for name in kinds_given)}" if kinds_given else "there is none"
            )
            raise InvalidRequest(f"{where} needs exactly one kind of constraint; {found}", param=where)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise InvalidRequest(
                "whitespace_pattern and disable_any_whitespace contradict each other",
                param=f"{prefix}whitespace_pattern",
            )
        if kinds_given and kinds_given[0] in ("regex", "choice", "grammar"):
            for name in _STYLE:
                if getattr(self, name) not in (None, False):
                    raise InvalidRequest(
                        f"{name} applies to JSON only, not to {kinds_given[0]}", param=f"{prefix}{name}"
                    )


class InputGrammar(Struct, kw_only=True):
    """Grammar that constrains the input of a custom tool."""

    definition: Annotated[str, Meta(min_length=1)]
    syntax: Literal["lark", "regex"]


_GUIDED = ("json", "regex", "choice", "grammar", "whitespace_pattern")
_RIVALS = {"regex": "regex", "ebnf": "grammar", "grammar": "grammar", "json_schema": "json"}
_ONE_TEXT = Annotated[str, Meta(min_length=1)]


class ConstrainedOutput(Struct, kw_only=True):
    """Request fields of constrained output under the names of vLLM (before and after 0.12), SGLang (`regex`, `ebnf`,
    `json_schema`), llama.cpp (`grammar`, `json_schema`) and Ollama (`format`). Every route accepts all of them."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: _ONE_TEXT | None = None
    guided_choice: Annotated[list[_ONE_TEXT], Meta(min_length=1)] | None = None
    guided_grammar: _ONE_TEXT | None = None
    guided_whitespace_pattern: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    regex: _ONE_TEXT | None = None
    ebnf: _ONE_TEXT | None = None
    grammar: _ONE_TEXT | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    format: dict[str, Any] | Literal["", "json"] | None = None

    def check_constraints(self) -> None:
        """Raise InvalidRequest if a field sets several constraints or none."""
        if self.structured_outputs is not None:
            self.structured_outputs.check("structured_outputs", "structured_outputs.")
        if guided := self._guided:
            StructuredOutputs(**guided).check("guided_json", "guided_")

    @property
    def _guided(self) -> dict[str, Any]:
        return {kind: value for kind in _GUIDED if (value := getattr(self, f"guided_{kind}")) is not None}

    @property
    def constraints(self) -> dict[str, StructuredOutputs]:
        """Return the checked constraints and JSON styles by request field name."""
        found: dict[str, StructuredOutputs] = {}
        if (wanted := self.structured_outputs) is not None:
            kinds = wanted.kinds_given
            found[f"structured_outputs.{kinds[0]}" if kinds else "structured_outputs"] = wanted
        if guided := self._guided:
            found[f"guided_{next(iter(guided))}"] = StructuredOutputs(**guided)
        for name, kind in _RIVALS.items():
            if (value := getattr(self, name)) is not None:
                found[name] = StructuredOutputs(**{kind: value})
        if self.format:
            json = StructuredOutputs(json_object=True) if self.format == "json" else StructuredOutputs(json=self.format)
            found["format"] = json
        return found


CONSTRAINTS = tuple(info.name for info in msgspec.structs.fields(ConstrainedOutput))


def asks_for_nothing(value: Any, idle: tuple[Any, ...]) -> bool:
    # By type too: False is not 0 here.
    return value is None or any(type(value) is type(other) and value == other for other in idle)


# --- decoding -----------------------------------------------------------------------------------------------------


class Checked(Protocol):
    """Wire type that can check itself after decoding."""

    def check(self) -> None: ...


# Parts of a message that hold what is no text.
_NO_TEXT = frozenset({
    "image_url", "image", "input_image", "input_audio", "audio", "audio_url", "video", "video_url", "input_video", "file",
    "file_url", "input_file", "document",
})  # fmt: skip
T = TypeVar("T", bound=Checked)
D = TypeVar("D")

MAX_UNKNOWN_BYTES = 1 << 16  # of a body, that are no field's: their names have to be looked at one by one
MAX_GUESSED_CHARS = 64  # of an unknown name: a longer one is no field's with a letter too many

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def readable(decode: Callable[[bytes], D], body: bytes) -> D:
    """Return `decode(body)`. Raises UnreadableBody for invalid JSON or too deep nesting; ValidationErrors pass through."""
    try:
        return decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableBody(f"We could not parse the JSON body of your request: {clip(error)}") from None
    except RecursionError:
        raise UnreadableBody("We could not parse the JSON body of your request: it is nested too deeply") from None


class Wire(Generic[T]):
    """Decoder of request bodies to type `kind`. `refused`: unsupported fields, with their accepted values. Only a subclass
    inside the decoder declares them. `may_be_ignored`: refused fields that are ignored if the client can be informed.
    `replaced`: fields to suggest instead of refused fields."""

    def __init__(
        self,
        kind: type[T],
        refused: Mapping[str, tuple[Any, ...]],
        may_be_ignored: Collection[str] = (),
        replaced: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        made = {"__module__": kind.__module__, "__annotations__": dict.fromkeys(refused, Any), **dict.fromkeys(refused)}
        options = {"kw_only": True, "forbid_unknown_fields": True}
        # Not `defstruct`, which knows no metaclass but msgspec's own.
        wire = types.new_class(kind.__name__, (kind,), options, lambda namespace: namespace.update(made))
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(wire)
        self._refused = refused
        self._may_be_ignored = may_be_ignored
        self._replaced = replaced
        self._refused_values: Callable[[T], Any] | None = attrgetter(*refused) if refused else None
        self._all_null = (None,) * len(refused)
        self._names = [info.encode_name for info in msgspec.structs.fields(wire)]
        self._known = frozenset(self._names)
        # Values are skipped, not built: the cheapest way to learn how many bytes are no field's.
        raw = [(name, msgspec.Raw, msgspec.Raw()) for name in self._names]
        self._raw = msgspec.json.Decoder(msgspec.defstruct(f"Raw{kind.__name__}", raw))

    def decode(self, body: bytes, ignored: list[str] | None = None) -> T:
        """Return the decoded and checked `body`. With `ignored`, unknown fields are dropped and their names appended to that
        list. Raises UnreadableBody, UnknownParameter, UnsupportedParameter or InvalidRequest."""
        request = self._strictly(body) if ignored is None else self._leniently(body, ignored)
        # Nearly always true, and one comparison instead of fifty.
        if self._refused_values is not None and self._refused_values(request) != self._all_null:
            self._check_refused(request, ignored)
        request.check()
        return request

    def _strictly(self, body: bytes) -> T:
        try:
            return cast("T", readable(self._decoder.decode, body))
        except msgspec.ValidationError as error:
            raise refusal_of(str(error), self._names) from None

    def _leniently(self, body: bytes, ignored: list[str]) -> T:
        try:
            return self._strictly(body)
        except UnknownParameter as refusal:
            if refusal.is_nested:
                raise
            return self._strictly(self._without_unknown(body, ignored, refusal))

    def _without_unknown(self, body: bytes, ignored: list[str], refusal: UnknownParameter) -> bytes:
        """Return `body` without its unknown fields. `refusal`: error for the first unknown field."""
        known = readable(self._raw.decode, body)
        if len(body) - sum(map(len, msgspec.structs.astuple(known))) > MAX_UNKNOWN_BYTES:
            raise UnknownParameter(
                refusal.name, param=refusal.name, hint=f" (unknown fields may have at most {MAX_UNKNOWN_BYTES} bytes)"
            )
        fields = readable(_FIELDS.decode, body)
        ignored += [clip(name) for name in fields if name not in self._known]
        return msgspec.json.encode({name: value for name, value in fields.items() if name in self._known})

    def _check_refused(self, request: T, ignored: list[str] | None) -> None:
        for name, idle in self._refused.items():
            if asks_for_nothing(getattr(request, name), idle):
                continue
            if ignored is None or name not in self._may_be_ignored:
                raise UnsupportedParameter(name, instead=self._replaced.get(name))
            ignored.append(name)


def refusal_of(message: str, names: Sequence[str] = (), where: str = "") -> InvalidRequest:
    """Return the error for a ValidationError's `message`. `names`: names of known fields. `where`: path of the decoded object."""
    what, _, path = message.partition(" - at `$")
    path = (where + path.rstrip("`")).lstrip(".").removesuffix("[...]") if path else where
    if unknown := _UNKNOWN.fullmatch(what):
        name = unknown[1]
        is_near = not path and len(name) <= MAX_GUESSED_CHARS
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.75) if is_near else []
        hint = f" (did you mean {close[0]}?)" if close else ""
        return UnknownParameter(name, param=f"{path}.{name}".lstrip("."), hint=hint)
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing:
        path = f"{path}.{missing[1]}".lstrip(".")
        return InvalidRequest(f"Missing required parameter: {path}", param=path)
    kind = re.fullmatch(r"Invalid value '(.*)'", what)
    if kind and path.endswith(".type") and kind[1] in _NO_TEXT:
        return TextOnly(path.removesuffix(".type"), kind[1], param=path)
    if kind and path.endswith(".type"):
        return UnsupportedParameter(f"{path.removesuffix('.type')} of type {clip(kind[1])!r}", param=path)
    if not path:
        return InvalidRequest(f"The request body is invalid: {clip(what[:1].lower() + what[1:])}")
    return InvalidRequest(f"Invalid {path!r}: {clip(what[:1].lower() + what[1:])}", param=path)
