"""Models that take turns, without any model: sources that a test opens, requests that stay until it lets them go, and its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from server.http.call import CURRENT_ID, Call
from server.models.defaults import sampling_defaults
from server.models.lifecycle import LoadError
from server.models.model import LoadedModel
from server.models.prompt import ChatTemplate
from server.models.swaps import Outline, SwappedModel, Swaps
from tests.fakes import FakeEngine, fake_model
from tests.server.tiny import EOS, chatml, loaded_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


async def until(condition: Callable[[], Any]) -> None:
    """Lets the loop turn: what it waits for comes from other tasks, and from sockets."""
    while not condition():  # noqa: ASYNC110 (there is no event for a state in the middle of the swaps)
        await asyncio.sleep(0)


class FakeSource:
    """`may_prepare`, `may_load` and `may_outline`: it waits for these; `broken`: what `load` complains of, `missing` what `prepare`
    does."""

    def __init__(self, name: str, *, paused: bool = False) -> None:
        model = fake_model(vocab_size=TOKENIZER.vocab_size, eos_token_ids=frozenset({EOS}), max_model_len=512)
        says = [*TOKENIZER.encode(f"I am {name}"), EOS]
        self.name = name
        self.engine = FakeEngine(lambda request: says, model=model, paused=paused)
        self.may_prepare, self.may_load = asyncio.Event(), asyncio.Event()
        self.may_prepare.set()
        self.may_load.set()
        self.may_outline = asyncio.Event()  # nobody knows anything of it, unless a test lets it
        self.chats, self.tasks = True, ("generate",)  # what its files say
        self.missing: str | None = None
        self.broken: str | None = None
        self.num_prepared = self.num_loaded = 0
        self.loaded_for: str | None = "nobody yet"
        self.place: SwappedModel | None = None

    async def prepare(self) -> None:
        self.num_prepared += 1
        await self.may_prepare.wait()
        if self.missing is not None:
            raise LoadError(self.missing)

    async def outline(self) -> Outline:
        await self.may_outline.wait()
        return Outline(1024, ("image",), self.tasks, self.chats)

    async def load(self) -> LoadedModel:
        self.num_loaded += 1
        self.loaded_for = CURRENT_ID.get()
        await self.may_load.wait()
        if self.broken is not None:
            raise LoadError(self.broken)
        template = chatml(TOKENIZER) if self.chats else ChatTemplate(None)
        made = loaded_model(self.engine, TOKENIZER, template, sampling_defaults(), (self.name,))
        return made.in_turns(self.place)


class Timers:
    """A clock that stands still, and what is due by it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.due: list[tuple[float, Callable[[], None], FakeHandle]] = []

    def clock(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        handle = FakeHandle()
        self.due.append((self.now_s + delay_s, call, handle))
        return handle

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        past = [each for each in self.due if each[0] <= self.now_s]
        self.due = [each for each in self.due if each[0] > self.now_s]
        for _, call, handle in past:
            if not handle.is_cancelled:
                call()


class FakeHandle:
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Turns:
    """Swaps of models called by their letters, the first of which is loaded."""

    def __init__(self, letters: str, *, paused: bool = False, **options: Any) -> None:
        self.timers = Timers()
        self.sources = {letter: FakeSource(letter, paused=paused) for letter in letters}
        self.swaps = Swaps(
            [*self.sources.items()], clock=self.timers.clock, call_later=self.timers.call_later, **options
        )
        for model in self.swaps.models:
            self.sources[model.name].place = model

    def add(self, letter: str) -> None:
        self.sources[letter] = FakeSource(letter)
        self.sources[letter].place = self.swaps.add(letter, self.sources[letter])

    async def close_engines(self) -> None:
        for source in self.sources.values():
            await source.engine.close()

    async def begin(self) -> LoadedModel:
        first = self.swaps.models[0]
        loaded = await self.sources[first.name].load()
        self.swaps.begin_with(first, loaded)
        return loaded

    def __getitem__(self, letter: str) -> SwappedModel:
        found = self.swaps.find(letter)
        assert found is not None
        return found

    def ask(self, letter: str, deadline_s: float | None = None, call: Call | None = None) -> Caller:
        return Caller(self[letter], deadline_s, call or Call())

    @property
    def states(self) -> str:
        """A capital is loaded; a bracket around it takes nobody new."""
        shown = {model.name: model for model in self.swaps.models}
        return " ".join(
            (letter.upper() if model.is_open else f"({letter.upper()})")
            if model.status == "loaded"
            else model.status[:4]
            for letter, model in shown.items()
        )


class Caller:
    """A request: it enters, and stays until `leave`."""

    def __init__(self, model: SwappedModel, deadline_s: float | None, call: Call) -> None:
        self.is_inside = False
        self._may_leave = asyncio.Event()
        self.task = asyncio.create_task(self._live(model, deadline_s, call))

    async def _live(self, model: SwappedModel, deadline_s: float | None, call: Call) -> None:
        try:
            await model.enter(call, deadline_s)
            self.is_inside = True
            await self._may_leave.wait()
        finally:
            call.end()

    async def enters(self) -> None:
        await until(lambda: self.is_inside or self.task.done())
        if not self.is_inside:
            self.task.result()

    async def leave(self) -> None:
        self._may_leave.set()
        await self.task
