"""Content blocks of messages and tool results.

`cache_control` is accepted on every block and has no effect, because prefixes are always cached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from server.http.errors import InvalidRequest, UnsupportedParameter, clip
from server.http.schema import Name

CacheControl = dict[str, Any]


class TextBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None  # of documents, which there are none of


class Base64Source(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="base64"):
    """File in base64. `media_type` is ignored, because the type is detected from the file's contents."""

    data: str
    media_type: str


class UrlSource(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="url"):
    url: str


class TextSource(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    data: str
    media_type: str | None = None


class ImageBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="image"):
    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None


class ContentSource(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="content"):
    content: str | list[TextBlock | ImageBlock]


class Citations(Struct, kw_only=True, forbid_unknown_fields=True):
    enabled: bool | None = None


class DocumentBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="document"):
    """Document as text. `title` and `context` are placed before the text in the prompt."""

    source: Base64Source | UrlSource | TextSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None


class UnreadBlock(Struct, kw_only=True):
    """Content block of a known type that no model of this server supports. It is rejected by name."""


class SearchResultBlock(UnreadBlock, kw_only=True, tag_field="type", tag="search_result"):
    pass


class ToolReferenceBlock(UnreadBlock, kw_only=True, tag_field="type", tag="tool_reference"):
    pass


class ServerToolUseBlock(UnreadBlock, kw_only=True, tag_field="type", tag="server_tool_use"):
    pass


_Unread = SearchResultBlock | ToolReferenceBlock | ServerToolUseBlock


class ThinkingBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier assistant message. `signature` is not checked."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(
    Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="redacted_thinking"
):
    """Encrypted reasoning of an earlier assistant message, in `data`. It is dropped."""

    data: str


class ToolUseBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None  # who asked for the call; the model did
    toolset_name: None = None


class ToolResultBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    tool_use_id: Name
    content: str | list[TextBlock | ImageBlock | DocumentBlock | _Unread] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | _Unread
)


def check_blocks(blocks: Iterable[Block], where: str) -> None:
    """Raise InvalidRequest if a block has content that no model of this server supports. `where`: the blocks' field."""
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if isinstance(block, UnreadBlock):
            kind = block.__struct_config__.tag
            raise InvalidRequest(
                f"{place}: content of type {kind} is not supported; send text, images or text documents", param=place
            )
        if isinstance(block, TextBlock) and block.citations:
            raise UnsupportedParameter(f"{place}.citations")
        if isinstance(block, DocumentBlock):
            _check_document(block, place)
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
            check_blocks(block.content, f"{place}.content")


def _check_document(block: DocumentBlock, place: str) -> None:
    if block.citations is not None and block.citations.enabled:
        raise UnsupportedParameter(f"{place}.citations")
    if isinstance(block.source, Base64Source | UrlSource):
        kind = getattr(block.source, "media_type", "a URL")
        raise InvalidRequest(
            f"{place}.source: documents of {clip(kind)} are not supported. Send text, or an image as a block of type image",
            param=f"{place}.source",
        )
