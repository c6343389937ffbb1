"""LoadedModel: the engine, and all that turns text into its ids and back.

Knows neither HTTP nor any API. What compiles grammars is handed to it, by its protocol."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Protocol

from runtime.api import EngineClient, MatcherFactory, ModelInfo
from server import __version__
from server.errors import ModelNotFound, TaskNotSupported
from server.loaded.chat_format import ChatFormat
from server.loaded.defaults import SamplingDefaults
from server.loaded.infill import InfillFormat, infill_format
from server.loaded.json_style import JsonStyle
from server.loaded.pooling import ServedPooling
from server.loaded.prompt import ChatTemplate
from server.loaded.tokenizer import Tokenizer


class Grammar(Protocol):
    """Plain data that says what a text may look like."""

    def source(self, tokenizer: Tokenizer, style: JsonStyle) -> str:
        """The grammar as the compiler reads it. Raises GrammarError."""
        ...


class GrammarCompiler(Protocol):
    """Makes matchers, which hold a sequence to a grammar, for the tokens of the loaded model."""

    async def factory(self, grammar: Grammar) -> MatcherFactory:
        """Raises GrammarError for a grammar that cannot be compiled, or costs too much."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model with all that turns text into its ids and back. `names`: what clients call it, first the one in answers.
    `allow_special_tokens`: those in what clients write into chats are meant, where they do not say otherwise. `pooling`: what it is
    served for in place of generating, None where it generates. `is_gguf`: its weights came in such a file."""

    engine: EngineClient
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    defaults: SamplingDefaults
    names: tuple[str, ...]
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    grammars: GrammarCompiler = field(kw_only=True)
    allow_special_tokens: bool = field(default=False, kw_only=True)
    pooling: ServedPooling | None = field(default=None, kw_only=True)
    is_gguf: bool = field(default=False, kw_only=True)
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    fingerprint: str = field(init=False)
    infill: InfillFormat | None = field(init=False)  # None: the model does not fill in the middle

    def __post_init__(self) -> None:
        object.__setattr__(self, "infill", infill_format(self.tokenizer))
        object.__setattr__(self, "fingerprint", _fingerprint(self.name, self.engine.model))

    def check_name(self, wanted: str | None) -> None:
        """Raises ModelNotFound unless `wanted` is one of the names, or None, which is the model there is."""
        if wanted is not None and wanted not in self.names:
            raise ModelNotFound(wanted, self.names)

    def require_pooling(self, task: str) -> ServedPooling:
        """What prompts are pooled to. Raises TaskNotSupported where the model generates; `task`: what was asked for."""
        if self.pooling is None:
            hint = "; start the server with --runner pooling for that"
            raise TaskNotSupported(self.engine.model.architecture, task, ("generate",), hint=hint)
        return self.pooling

    def check_generates(self) -> None:
        """Raises TaskNotSupported where the model is served to be pooled."""
        if self.pooling is not None:
            raise TaskNotSupported(self.engine.model.architecture, "generate", self.pooling.tasks)

    @property
    def name(self) -> str:
        return self.names[0]


def _fingerprint(name: str, model: ModelInfo) -> str:
    """Changes with what may change an answer: the version, the model, its type and device."""
    facts = (name, model.architecture, model.num_parameters, model.dtype, model.device)
    return f"oneloop-{__version__}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"
