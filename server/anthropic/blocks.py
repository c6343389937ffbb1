"""Content blocks of a request: what messages and tool results are made of.

`cache_control` is taken on every block and does nothing: prefixes are cached whether it is there or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from server.wire.errors import InvalidRequest, UnsupportedParameter
from server.wire.schema import Name

CacheControl = dict[str, Any]


class TextBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None  # of documents, which there are none of


class UnreadBlock(Struct, kw_only=True):
    """A block that we know and cannot show to a model."""


class ImageBlock(UnreadBlock, kw_only=True, tag_field="type", tag="image"):
    pass


class DocumentBlock(UnreadBlock, kw_only=True, tag_field="type", tag="document"):
    pass


class SearchResultBlock(UnreadBlock, kw_only=True, tag_field="type", tag="search_result"):
    pass


class ToolReferenceBlock(UnreadBlock, kw_only=True, tag_field="type", tag="tool_reference"):
    pass


class ServerToolUseBlock(UnreadBlock, kw_only=True, tag_field="type", tag="server_tool_use"):
    pass


_Unread = ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | ServerToolUseBlock


class ThinkingBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """`signature`: whoever made it may have sealed the text with it; we take the text as it is."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(
    Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="redacted_thinking"
):
    """Only whoever made it can read `data`."""

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
    content: str | list[TextBlock | _Unread] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | _Unread


def check_blocks(blocks: Iterable[Block], where: str) -> None:
    """`where`: the field that holds them. Raises InvalidRequest for what no model here could be shown."""
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if isinstance(block, UnreadBlock):
            kind = block.__struct_config__.tag
            raise InvalidRequest(
                f"{place}: content of type {kind} is not supported: models read text here", param=place
            )
        if isinstance(block, TextBlock) and block.citations:
            raise UnsupportedParameter(f"{place}.citations")
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
            check_blocks(block.content, f"{place}.content")
