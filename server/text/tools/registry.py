"""Registry of tool parsers by name, and detection of a model's parser from its chat template.

A template contains the format of previous calls, and the model writes new calls in the same format. Marks are tested from most
to least specific, since several formats share <tool_call>. If the template does not mention calls (the first Kimi K2), the
tokenizer's special tokens are tested."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Final

from server.text.tools.deepseek_v3 import DeepSeekV3
from server.text.tools.deepseek_v31 import DeepSeekV31
from server.text.tools.functiongemma import FunctionGemma
from server.text.tools.glm45 import Glm45
from server.text.tools.granite import Granite
from server.text.tools.harmony import Harmony
from server.text.tools.hermes import Hermes
from server.text.tools.kimi_k2 import KimiK2
from server.text.tools.llama3 import Llama3
from server.text.tools.mistral import Mistral
from server.text.tools.phi4 import Phi4
from server.text.tools.pythonic import Pythonic
from server.text.tools.qwen3_coder import Qwen3Coder
from server.text.tools.tool_parser import ToolParser, Tools

TOOL_PARSERS: Final[Mapping[str, type[ToolParser]]] = MappingProxyType({
    "hermes": Hermes,
    "qwen3_coder": Qwen3Coder,
    "llama3_json": Llama3,
    "pythonic": Pythonic,
    "mistral": Mistral,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "harmony": Harmony,
    "glm45": Glm45,
    "kimi_k2": KimiK2,
    "granite": Granite,
    "phi4": Phi4,
    "functiongemma": FunctionGemma,
})  # fmt: skip

# Names of these parsers in other servers.
ALIASES: Final[Mapping[str, str]] = MappingProxyType({
    "qwen3": "hermes", "qwen3_json": "hermes", "qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic", "olmo3": "pythonic", "openai": "harmony", "gpt_oss": "harmony",
    "glm47": "glm45", "granite4": "granite", "phi4_mini_json": "phi4", "deepseek_r1": "deepseek_v3",
})  # fmt: skip


def create(name: str, tools: Tools = ()) -> ToolParser:
    """Create a tool parser for one answer. Raises ValueError for an unknown name."""
    return named(name)(tools)


def named(name: str) -> type[ToolParser]:
    """Return the tool parser class called `name`. Raises ValueError for an unknown name."""
    try:
        return TOOL_PARSERS[ALIASES.get(name, name)]
    except KeyError:
        names = ", ".join(sorted({*TOOL_PARSERS, *ALIASES}))
        raise ValueError(f"there is no tool parser {name!r}: choose one of {names}") from None


def name_of(parser: type[ToolParser]) -> str:
    return next(name for name, kind in TOOL_PARSERS.items() if kind is parser)


def detect(template: str | Mapping[str, str] | None, special_tokens: Collection[str] = ()) -> str | None:
    """Return the name of a model's tool parser, or None if none matches; calls are then not parsed.

    `template`: chat template, or templates by name, of which "tool_use" is preferred. `special_tokens`: those of the tokenizer."""
    if template is not None and not isinstance(template, str):
        template = template.get("tool_use") or template.get("default")
    marks = _Marks(template or "", frozenset(special_tokens))
    return next((name for name, is_it in _TELLING if is_it(marks)), None)


class _Marks:
    """Searcher for marks of tool call formats: `in` searches the template, `has` also the special tokens."""

    def __init__(self, template: str, special_tokens: frozenset[str]) -> None:
        self._template = template
        self._special_tokens = special_tokens

    def __contains__(self, mark: str) -> bool:
        return mark in self._template

    def has(self, mark: str) -> bool:
        return mark in self._template or mark in self._special_tokens


_TELLING: Final[tuple[tuple[str, Callable[[_Marks], bool]], ...]] = (
    ("harmony", lambda marks: marks.has("<|channel|>") and marks.has("<|message|>")),
    ("functiongemma", lambda marks: marks.has("<start_function_call>")),
    ("kimi_k2", lambda marks: marks.has("<|tool_calls_section_begin|>")),
    ("deepseek_v3", lambda marks: marks.has("<｜tool▁sep｜>") and "```json" in marks),
    ("deepseek_v31", lambda marks: marks.has("<｜tool▁sep｜>")),
    ("qwen3_coder", lambda marks: "<function=" in marks and "<parameter=" in marks),
    ("glm45", lambda marks: "<arg_key>" in marks),
    ("pythonic", lambda marks: "<function_calls>" in marks or "[func_name1(" in marks),
    ("mistral", lambda marks: marks.has("[TOOL_CALLS]")),
    (
        "granite",
        lambda marks: marks.has("<|start_of_role|>") and (marks.has("<|tool_call|>") or "<tool_call>" in marks),
    ),
    ("phi4", lambda marks: "functools[" in marks or marks.has("<|tool_call|>")),
    ("hermes", lambda marks: "<tool_call>" in marks),
    (
        "llama3_json",
        lambda marks: '"parameters": ' in marks and ("<|start_header_id|>" in marks or "<|header_start|>" in marks),
    ),
)
