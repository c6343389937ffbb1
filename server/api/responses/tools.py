"""Tools of the Responses API: converts a request's tools to functions for the model, and function names back to tool names.

The function name of a tool in a namespace begins with the namespace. A custom tool becomes a function with one string argument
(`generate.custom_tools`). Hosted tools of OpenAI, and tools built into its models, are dropped and reported to the client. A
request that requires a call but has only dropped tools is rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from server.api.responses.request_types import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    GrammarFormat,
    NamespaceTool,
    ThisCustomTool,
    ThisTool,
)
from server.generate.custom_tools import custom_function
from server.generate.request import OnlyFunction, ToolChoice, ToolFunction
from server.http.errors import InvalidRequest, UnsupportedParameter, clip
from server.http.schema import MAX_TOOLS, Json, refusal_of

LEFT_OUT: Final = frozenset({
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search", "mcp",
    "code_interpreter", "image_generation", "computer", "computer_use_preview", "local_shell", "shell", "apply_patch",
    "tool_search", "programmatic_tool_calling",
})  # fmt: skip
JOINT: Final = "__"
T = TypeVar("T", bound="FunctionTool | CustomTool | NamespaceTool")


@dataclass(frozen=True, slots=True)
class Tool:
    """Tool of a request. `name`, `namespace`: as the client sent them. `function`: the function that the model is given."""

    function: ToolFunction
    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """All tools of a request. `echoed`: tools as the response repeats them. `left_out`: names of fields without effect."""

    tools: Sequence[Tool] = ()
    choice: ToolChoice | None = None
    echoed: Sequence[Json] = ()
    left_out: Sequence[str] = ()
    by_function: Mapping[str, Tool] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_function", {tool.function.name: tool for tool in self.tools})

    @property
    def functions(self) -> list[ToolFunction]:
        return [tool.function for tool in self.tools]


def function_name(name: str, namespace: str | None) -> str:
    """Return the function name, given to the model, of the tool `name` in `namespace`."""
    if namespace is None:
        return name
    return f"{namespace.removesuffix(JOINT)}{JOINT}{name}"


def read(given: Sequence[Json], choice: str | ThisTool | ThisCustomTool | AllowedTools | None) -> Tools:
    """Convert the request's tools and tool choice. Raises InvalidRequest."""
    found: list[Tool] = []
    echoed: list[Json] = []
    left_out: dict[str, str] = {}  # what, and where it stands
    for number, raw in enumerate(given):
        where, kind = f"tools[{number}]", raw.get("type")
        if kind in LEFT_OUT:
            left_out.setdefault(f"tools.{kind}", where)
            continue
        tools, shown, unread = _read(raw, where)
        found += tools
        echoed.append(shown)
        left_out |= dict.fromkeys(unread, where)
    if len(found) > MAX_TOOLS:
        raise InvalidRequest(f"there are {len(found)} tools; at most {MAX_TOOLS} are allowed", param="tools")
    chosen, allowed = _chosen(found, choice, left_out)
    return Tools(allowed, chosen, echoed, tuple(left_out))


def _read(raw: Json, where: str) -> tuple[list[Tool], Json, list[str]]:
    """Convert one entry of `tools`. Return its tools, the entry for the response, and the names of fields without effect."""
    unread: list[str] = []
    entry = _converted(raw, FunctionTool | CustomTool | NamespaceTool, where, unread)
    if not isinstance(entry, NamespaceTool):
        tool = _tool(entry, None, "", where, unread)
        return [tool], _shown(entry) if isinstance(entry, FunctionTool) else raw, unread
    tools = []
    for number, inner in enumerate(entry.tools):
        place = f"{where}.tools[{number}]"
        one = _converted(inner, FunctionTool | CustomTool, place, unread)
        # What the namespace is for is said once, with the first of its tools.
        tools.append(_tool(one, entry.name, "" if number else entry.description, place, unread))
    return tools, raw, unread


def _converted(raw: Json, kinds: Any, where: str, unread: list[str]) -> Any:
    try:
        tool = msgspec.convert(raw, kinds)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error), where=where) from None
    known = {info.encode_name for info in msgspec.structs.fields(tool)} | {"type"}
    unread += [f"tools.{clip(name)}" for name in raw if name not in known]
    return tool


def _tool(
    tool: FunctionTool | CustomTool, namespace: str | None, introduction: str, where: str, unread: list[str]
) -> Tool:
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise UnsupportedParameter(f"{where}.allowed_callers")
    if tool.is_async:
        raise UnsupportedParameter(f"{where}.async")
    if tool.defer_loading:
        unread.append("tools.defer_loading")  # there it is from the start
    name = function_name(tool.name, namespace)
    description = "\n\n".join(filter(None, (introduction, tool.description)))
    if isinstance(tool, FunctionTool):
        if tool.output_schema is not None:
            unread.append("tools.output_schema")
        function = ToolFunction(name, description or None, tool.parameters, bool(tool.strict))
        return Tool(function, tool.name, namespace)
    grammar = tool.format if isinstance(tool.format, GrammarFormat) else None
    return Tool(custom_function(name, description, grammar), tool.name, namespace, is_custom=True)


def _shown(tool: FunctionTool) -> Json:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


# --- which of them may be called ----------------------------------------------------------------------------------


def _chosen(
    tools: list[Tool], choice: str | ThisTool | ThisCustomTool | AllowedTools | None, left_out: Mapping[str, str]
) -> tuple[ToolChoice | None, list[Tool]]:
    """Return the tool choice of the GenerateRequest, and the tools that it allows."""
    match choice:
        case ThisTool(name=name):
            return OnlyFunction(_function(tools, name, choice.namespace, is_custom=False)), tools
        case ThisCustomTool(name=name):
            return OnlyFunction(_function(tools, name, choice.namespace, is_custom=True)), tools
        case AllowedTools(mode=mode):
            tools = _allowed(tools, choice, left_out)
            return mode if tools or mode == "required" else None, tools
        case "required":
            if not tools and left_out:
                kind, where = next(iter(left_out.items()))
                what = f"{where} of type {kind.removeprefix('tools.')!r}"
                raise UnsupportedParameter(what, param=f"{where}.type", instead="a function")
            return "required", tools
        case "none" | "auto":
            return choice if tools else None, tools
    return None, tools


def _function(tools: Sequence[Tool], name: str, namespace: str | None, *, is_custom: bool) -> str:
    """Return the function name of the tool that a tool choice names. `namespace` may be None if the tool's name is unique."""
    found = [
        tool for tool in tools
        if tool.is_custom is is_custom and (name == tool.name or name == tool.function.name)
        and namespace in (None, tool.namespace)
    ]  # fmt: skip
    outer = [tool for tool in found if tool.namespace is None]
    if not found:
        return name  # which is refused as a function that is none of the tools
    return (outer or found)[0].function.name


def _allowed(tools: Sequence[Tool], choice: AllowedTools, left_out: Mapping[str, str]) -> list[Tool]:
    names: set[str] = set()
    for allowed in choice.tools:
        kind, name = allowed.get("type"), allowed.get("name")
        if kind in LEFT_OUT and f"tools.{kind}" in left_out:
            continue
        found = {
            tool.function.name for tool in tools
            if (kind == "namespace" and tool.namespace == name)
            or (kind != "namespace" and name in (tool.name, tool.function.name) and tool.is_custom is (kind == "custom"))
        }  # fmt: skip
        if not found:
            raise InvalidRequest(f"tool_choice allows {clip(name)!r}, which is not in tools", param="tool_choice")
        names |= found
    return [tool for tool in tools if tool.function.name in names]
