"""LoadedModel: the engine, and everything that converts between text and its token ids.

Independent of HTTP and of every API. The grammar compiler is passed in, as a protocol."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Protocol

from runtime.api import Adapter, Busy, EngineClient, EngineHealth, MatcherFactory, MediaItem, ModelInfo, SamplingParams
from server.config import __version__
from server.http.call import Call
from server.http.errors import InvalidRequest, TaskNotSupported
from server.media.reader import MediaReader, NoMedia
from server.models.adapters import Resolver
from server.models.chat_format import ChatFormat
from server.models.infill import InfillFormat, infill_format
from server.models.pooling import ServedPooling
from server.models.prompt import ChatTemplate
from server.models.speech import ServedSpeech
from server.models.swaps import SwappedModel, SwapStatus
from server.models.tokenizer import Tokenizer

SPEECH_TASKS = ("transcribe", "translate")


class Constraint(Protocol):
    """Constraint on generated text, as plain data."""

    def source(self, tokenizer: Tokenizer) -> str:
        """Return the grammar in the compiler's syntax. Raises GrammarError."""
        ...


class GrammarCompiler(Protocol):
    """Compiler of grammars to matchers, which constrain a sequence's tokens, for the loaded model."""

    async def factory(self, grammar: Constraint, caller: bytes | None = None) -> MatcherFactory:
        """Compile `grammar`. Raises GrammarError if it is invalid or too expensive."""
        ...


class Engines(tuple[EngineClient, ...]):
    """All engines of a process: usually one; a model served beside another has its own."""

    __slots__ = ()

    def health(self) -> EngineHealth:
        """Return the health of all, as `EngineHealth.of_all` does."""
        return EngineHealth.of_all([engine.health() for engine in self])

    def check_room(self, caller: bytes | None) -> None:
        """Raise Busy if no engine can accept a request of the caller. Used before the model of a request is known."""
        *others, last = self
        for engine in others:
            with suppress(Busy):
                engine.check_room(caller)
                return
        last.check_room(caller)

    async def drain(self, limit_s: float) -> int:
        """Drain all engines. Return the number of requests that were aborted at the time limit."""
        return sum(await asyncio.gather(*(engine.drain(limit_s) for engine in self)))

    async def close(self) -> bool:
        """Close all engines. Return whether all have ended."""
        return all([await engine.close() for engine in self])


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Loaded model with its tokenizer, templates and parsers.

    `names`: names for clients; responses use the first. `allow_special_tokens`: special tokens in chat texts are parsed by
    default. `pooling`: its pooling task, None if it generates. `resolver`: loads adapters that requests name; `adapter`: the
    adapter of a request's view of the model. `gguf_quantization`: quantisation of a GGUF file, else None. `beside`: a
    pooling or speech model in the same process. `swapped`: its state among swapped models; None if it is always loaded.
    `media`: reads media of prompts. `mm_adapters`: default adapters by modality. `takes_any_name`: serve requests for unknown
    names. `add`: serves another local model, by name, by swapping; None without --enable-model-management. `speech`: format and
    threads of its transcripts, None for a text model."""

    engine: EngineClient
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    defaults: SamplingParams
    names: tuple[str, ...]
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    grammars: GrammarCompiler = field(kw_only=True)
    allow_special_tokens: bool = field(default=False, kw_only=True)
    pooling: ServedPooling | None = field(default=None, kw_only=True)
    gguf_quantization: str | None = field(default=None, kw_only=True)
    beside: LoadedModel | None = field(default=None, kw_only=True)
    swapped: SwappedModel[LoadedModel] | None = field(default=None, kw_only=True)
    media: MediaReader | NoMedia = field(default_factory=NoMedia, kw_only=True)
    mm_adapters: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    takes_any_name: bool = field(default=False, kw_only=True)
    add: Callable[[str], None] | None = field(default=None, kw_only=True)
    speech: ServedSpeech | None = field(default=None, kw_only=True)
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    fingerprint: str = field(init=False)
    resolver: Resolver | None = field(default=None, kw_only=True)
    adapter: Adapter | None = field(default=None, init=False)
    infill: InfillFormat | None = field(init=False)  # None: the model does not fill in the middle

    def __post_init__(self) -> None:
        object.__setattr__(self, "infill", infill_format(self.tokenizer))
        object.__setattr__(self, "fingerprint", _fingerprint(self.name, self.engine.model))

    @property
    def besides(self) -> tuple[LoadedModel, ...]:
        """Models that are always loaded beside this one: for embeddings, and for speech."""
        return () if self.beside is None else (self.beside, *self.beside.besides)

    @property
    def all(self) -> tuple[LoadedModel, ...]:
        """All models with an engine: this one, the one beside it, and others that are or were loaded."""
        return (self, *self.besides, *(each.loaded for each in self.others if each.loaded is not None))

    @property
    def others(self) -> tuple[SwappedModel[LoadedModel], ...]:
        """The other models that are swapped in and out."""
        own = self.swapped
        return () if own is None else tuple(each for each in own.swaps.models if each is not own)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a model to be loaded."""
        return 0 if self.swapped is None else self.swapped.swaps.num_waiting

    @property
    def is_resident(self) -> bool:
        """Return whether requests can use the model without unloading another one."""
        return self.swapped is None or self.swapped.status is SwapStatus.LOADED

    @property
    def status(self) -> str:
        """The status in llama.cpp's words: "loaded", "sleeping", "loading" or "unloaded"."""
        if self.swapped is not None and self.swapped.status is not SwapStatus.LOADED:
            return self.swapped.status.value
        return "sleeping" if self.engine.health().sleep_level else "loaded"

    @property
    def resident(self) -> tuple[LoadedModel, ...]:
        """Models of `all` that are loaded; none during a swap."""
        return tuple(each for each in self.all if each.is_resident)

    @property
    def engines(self) -> Engines:
        return Engines(each.engine for each in self.all)

    @property
    def all_names(self) -> tuple[str, ...]:
        beside = (name for each in self.besides for name in each.names)
        return (*self.names, *beside, *(each.name for each in self.others))

    def in_turns(self, place: SwappedModel[LoadedModel] | None) -> LoadedModel:
        """Return the model with its place among several."""
        return replace(self, swapped=place)

    async def enter(self, call: Call, deadline_s: float | None = None) -> None:
        """Load the model if necessary, and keep it loaded until `call` ends; required before using the engine. `deadline_s`:
        by the monotonic clock. Raises as `SwappedModel.enter` does."""
        if self.swapped is not None:
            await self.swapped.enter(call, deadline_s)

    async def enter_to_generate(self, call: Call, deadline_s: float | None = None) -> None:
        """Call `enter` for generation. Raises TaskNotSupported if the model is for pooling or transcription."""
        if self.speech is not None:
            raise TaskNotSupported(
                self.engine.model.architecture,
                "generate",
                SPEECH_TASKS,
                hint="; send audio to /v1/audio/transcriptions",
            )
        if self.pooling is not None:
            raise TaskNotSupported(self.engine.model.architecture, "generate", self.pooling.tasks)
        await self.enter(call, deadline_s)

    def knows(self, name: str) -> bool:
        """Return whether `name` is a name of this model, of a model beside it, or of a loaded adapter."""
        return name in self.all_names or (
            self.engine.adapters is not None and self.engine.adapters.find(name) is not None
        )

    def require_speech(self) -> ServedSpeech:
        """Return the transcription settings. Raises TaskNotSupported if the model does not transcribe."""
        if self.speech is None:
            tasks = ("generate",) if self.pooling is None else self.pooling.tasks
            hint = "; start the server with --speech-model for a speech model beside this one"
            if hearing := [each.name for each in self.besides if each.speech is not None]:
                hint = f"; {hearing[0]} transcribes"
            raise TaskNotSupported(self.engine.model.architecture, SPEECH_TASKS[0], tasks, hint=hint)
        return self.speech

    def require_pooling(self, task: str) -> ServedPooling:
        """Return the pooling settings. Raises TaskNotSupported if the model generates. `task`: the requested task."""
        if self.pooling is None:
            hint = "; start the server with --runner pooling for that, or with --embedding-model for another model beside it"
            if pooled := [each.name for each in self.besides if each.pooling is not None]:
                hint = f"; {pooled[0]} is to be pooled"
            elif self.swapped is not None:
                hint = f"; this server also has {', '.join(each.name for each in self.others)}"
            raise TaskNotSupported(self.engine.model.architecture, task, ("generate",), hint=hint)
        return self.pooling

    def adapter_for(self, media: Sequence[MediaItem]) -> Adapter | None:
        """Return the adapter of a prompt with these media items. Raises InvalidRequest if they require several."""
        adapters = self.engine.adapters
        if self.adapter is not None or adapters is None:
            return self.adapter
        wanted = {self.mm_adapters[item.modality] for item in media if item.modality in self.mm_adapters}
        if len(wanted) > 1:
            raise InvalidRequest(
                f"media in this prompt select the adapters {', '.join(sorted(wanted))}: name one as the model",
                param="model",
            )
        return adapters.find(wanted.pop()) if wanted else None

    def with_adapter(self, adapter: Adapter) -> LoadedModel:
        """Return a copy with another name and adapter that shares everything else."""
        return self._but(
            adapter=adapter,
            names=(adapter.name, *self.names),
            fingerprint=_fingerprint(adapter.name, self.engine.model),
            created=adapter.created,
        )

    def with_template(self, chat_template: ChatTemplate, chat_format: ChatFormat) -> LoadedModel:
        """Return a copy with another chat template and its chat format."""
        return self._but(chat_template=chat_template, chat_format=chat_format)

    def _but(self, **fields: object) -> LoadedModel:
        other = copy(self)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        return other

    @property
    def name(self) -> str:
        return self.names[0]


def _fingerprint(name: str, model: ModelInfo) -> str:
    """Return the system fingerprint. It changes with the version, the model, its dtype and device, which may change answers."""
    facts = (name, model.architecture, model.num_parameters, model.dtype, model.device)
    return f"oneloop-{__version__}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"
