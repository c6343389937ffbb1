"""LoadedModel: the engine, and everything that converts between text and the model's token ids.

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
        """Return the constraint's grammar in the compiler's syntax. Raises GrammarError."""
        ...


class GrammarCompiler(Protocol):
    """Compiler of grammars for the loaded model. A compiled grammar creates matchers, which constrain the tokens of a sequence."""

    async def factory(self, grammar: Constraint, caller: bytes | None = None) -> MatcherFactory:
        """Compile `grammar` for the client `caller`, and return a factory of matchers. Raises GrammarError."""
        ...


class Engines(tuple[EngineClient, ...]):
    """All engines of a process. There is usually one; each further model of the process has its own engine."""

    __slots__ = ()

    def health(self) -> EngineHealth:
        """Return the combined health of all engines, as `EngineHealth.of_all` computes it."""
        return EngineHealth.of_all([engine.health() for engine in self])

    def check_room(self, caller: bytes | None) -> None:
        """Raise Busy if no engine can accept a request of `caller`. Called before the model of a request is known."""
        *others, last = self
        for engine in others:
            with suppress(Busy):
                engine.check_room(caller)
                return
        last.check_room(caller)

    async def drain(self, limit_s: float) -> int:
        """Drain all engines within `limit_s` seconds. Return the number of requests that were aborted at the limit."""
        return sum(await asyncio.gather(*(engine.drain(limit_s) for engine in self)))

    async def close(self) -> bool:
        """Close all engines. Return True if all of them have ended."""
        return all([await engine.close() for engine in self])


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Loaded model with its tokenizer, templates and parsers. `names`: names for clients; responses use the first.
    `allow_special_tokens`: default for parsing special tokens in chat texts. `pooling`: pooling settings, None if the model
    generates. `resolver`: loader of adapters that requests name. `adapter`: adapter that this object's requests use.
    `gguf_quantization`: quantisation of a GGUF file, else None. `beside`: a pooling or speech model in the same process.
    `swapped`: state among models that are loaded and unloaded; None if the model is always loaded. `media`: reader of media in
    prompts. `mm_adapters`: default adapters by modality. `takes_any_name`: whether requests for unknown names are served. `add`:
    function that serves another local model by name; None without --enable-model-management. `speech`: format and threads of
    transcripts, None for a text model."""

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
        """Models for embeddings and for speech that are always loaded together with this model."""
        return () if self.beside is None else (self.beside, *self.beside.besides)

    @property
    def all(self) -> tuple[LoadedModel, ...]:
        """All models with an engine: this model, those of `besides`, and others that are loaded now or were loaded before."""
        return (self, *self.besides, *(each.loaded for each in self.others if each.loaded is not None))

    @property
    def others(self) -> tuple[SwappedModel[LoadedModel], ...]:
        """Other models that are loaded and unloaded on demand."""
        own = self.swapped
        return () if own is None else tuple(each for each in own.swaps.models if each is not own)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a model to be loaded."""
        return 0 if self.swapped is None else self.swapped.swaps.num_waiting

    @property
    def is_resident(self) -> bool:
        """Return whether requests can use the model without first unloading another model."""
        return self.swapped is None or self.swapped.status is SwapStatus.LOADED

    @property
    def status(self) -> str:
        """The model's status in llama.cpp's words: "loaded", "sleeping", "loading" or "unloaded"."""
        if self.swapped is not None and self.swapped.status is not SwapStatus.LOADED:
            return self.swapped.status.value
        return "sleeping" if self.engine.health().sleep_level else "loaded"

    @property
    def resident(self) -> tuple[LoadedModel, ...]:
        """Models of `all` that are loaded now; empty while models are being exchanged."""
        return tuple(each for each in self.all if each.is_resident)

    @property
    def engines(self) -> Engines:
        return Engines(each.engine for each in self.all)

    @property
    def all_names(self) -> tuple[str, ...]:
        beside = (name for each in self.besides for name in each.names)
        return (*self.names, *beside, *(each.name for each in self.others))

    def in_turns(self, place: SwappedModel[LoadedModel] | None) -> LoadedModel:
        """Return a copy of the model whose `swapped` is `place`."""
        return replace(self, swapped=place)

    async def enter(self, call: Call, deadline_s: float | None = None) -> None:
        """Load the model if necessary, and keep it loaded until `call` ends. Required before using the engine. `deadline_s`:
        latest time by the monotonic clock. Raises the errors of `SwappedModel.enter`."""
        if self.swapped is not None:
            await self.swapped.enter(call, deadline_s)

    async def enter_to_generate(self, call: Call, deadline_s: float | None = None) -> None:
        """Call `enter` for generation. Raises TaskNotSupported if the model is a pooling or speech model."""
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
        """Return whether `name` is a name of this model, of a model in `besides`, or of a loaded adapter."""
        return name in self.all_names or (
            self.engine.adapters is not None and self.engine.adapters.find(name) is not None
        )

    def require_speech(self) -> ServedSpeech:
        """Return the transcription settings. Raises TaskNotSupported if the model does not transcribe."""
        if self.speech is None:
            tasks = ("generate",) if self.pooling is None else self.pooling.tasks
            hint = "; start the server with --speech-model to add a speech model"
            if hearing := [each.name for each in self.besides if each.speech is not None]:
                hint = f"; use the model {hearing[0]}"
            raise TaskNotSupported(self.engine.model.architecture, SPEECH_TASKS[0], tasks, hint=hint)
        return self.speech

    def require_pooling(self, task: str) -> ServedPooling:
        """Return the pooling settings. Raises TaskNotSupported, naming `task`, if the model generates."""
        if self.pooling is None:
            hint = "; start the server with --runner pooling, or with --embedding-model to add a pooling model"
            if pooled := [each.name for each in self.besides if each.pooling is not None]:
                hint = f"; use the model {pooled[0]}"
            elif self.swapped is not None:
                hint = f"; this server also has {', '.join(each.name for each in self.others)}"
            raise TaskNotSupported(self.engine.model.architecture, task, ("generate",), hint=hint)
        return self.pooling

    def adapter_for(self, media: Sequence[MediaItem]) -> Adapter | None:
        """Return the adapter for a prompt with `media`, or None. Raises InvalidRequest if the items require different adapters."""
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
        """Return a copy that uses `adapter` and its name. The copy shares everything else."""
        return self._but(
            adapter=adapter,
            names=(adapter.name, *self.names),
            fingerprint=_fingerprint(adapter.name, self.engine.model),
            created=adapter.created,
        )

    def with_template(self, chat_template: ChatTemplate, chat_format: ChatFormat) -> LoadedModel:
        """Return a copy with another chat template and the chat format of that template."""
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
    """Return the system fingerprint of a response. It depends on all that can change answers: version, model, dtype and device."""
    facts = (name, model.architecture, model.num_parameters, model.dtype, model.device)
    return f"oneloop-{__version__}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"
