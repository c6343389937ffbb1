"""Pooling request in a neutral form, to which every API converts its own request.

Every text has the name of its request field for error messages, such as "input[17]"."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from runtime.api import PoolingParams
from server.generate.request import Chat, Truncation
from server.http.errors import Field, InvalidRequest

MAX_INPUTS = 1 << 14
MAX_NUMBERS = 1 << 24  # float32 in one answer: 64 MiB, and some 180 MB as JSON


class PoolText(Struct, frozen=True):
    """Text or its token ids. `max_tokens`: maximum number of tokens after truncation, without special tokens."""

    content: str | list[int]
    name: Field
    max_tokens: int | None = None


class Pair(Struct, frozen=True):
    """Pair of texts in one prompt, for a cross-encoder."""

    first: PoolText
    second: PoolText

    @property
    def name(self) -> Field:
        return self.second.name


Input = PoolText | Pair | Chat


class PoolRequest(Struct, frozen=True, kw_only=True):
    """Pooling request of any API. `inputs`: each has one result. `params`: shared, without token types. `field`: field name for
    errors about all inputs. `prefix`: text before each input. `allow_special_tokens`: if False, special tokens are encoded as
    text. `truncation`: if None, long inputs are rejected; -1 truncates to the context. `instruction`: for a score template."""

    inputs: Sequence[Input]
    params: PoolingParams
    field: str = "input"
    prefix: str = ""
    add_special_tokens: bool = True
    allow_special_tokens: bool = True
    truncation: Truncation | None = None
    instruction: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None


def texts_of(content: str | Sequence[str | int | list[int]], name: str) -> list[PoolText]:
    """Return the texts of the field `name`. `content`: a text, a list of texts, a list of token ids, or a list of such lists.
    Raises InvalidRequest."""
    if isinstance(content, str):
        return [PoolText(content, Field(name))]
    kinds = {type(item) for item in content}
    if len(kinds) > 1:
        raise InvalidRequest(f"{name} mixes texts and token ids", param=name)
    if kinds == {int}:
        return [PoolText([item for item in content if isinstance(item, int)], Field(name))]
    check_count(len(content), name)
    return [
        PoolText(item, Field(f"{name}[{number}]")) for number, item in enumerate(content) if not isinstance(item, int)
    ]


def check_count(num: int, name: str) -> None:
    """Raise InvalidRequest if the number of inputs `num` is 0 or exceeds the maximum."""
    if not num:
        raise InvalidRequest(f"{name} is empty", param=name)
    if num > MAX_INPUTS:
        raise InvalidRequest(f"{name} has {num} entries; at most {MAX_INPUTS} in one request", param=name)
