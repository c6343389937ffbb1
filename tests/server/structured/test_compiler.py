"""Compiling: once for equal grammars, off the event loop, within limits, and never the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref

import pytest

from runtime.api import ConstraintError
from server.generate.structured import compiler
from server.generate.structured.compiler import Grammars
from server.generate.structured.grammar import Alternatives, GrammarError, JsonSchema, Regex, Rules
from server.http.errors import TooManyRequests
from server.http.offload import GiveBack
from tests.server.smollm2 import ours
from tests.server.structured.reading import TOKENIZER, has, reads
from tests.server.tiny import EOS


class Counted(Regex, frozen=True, tag=True):
    """A grammar that tells where and how often it was compiled, and can be held up or fail."""

    name: str = ""

    def source(self, tokenizer):
        SEEN.append((self.name, threading.current_thread()))
        if self.name == "held":
            assert RELEASE.wait(60)
        if self.name == "broken":
            raise ZeroDivisionError
        return super().source(tokenizer)


SEEN: list[tuple[str, threading.Thread]] = []
RELEASE = threading.Event()


async def until(condition) -> None:
    while not condition():
        await asyncio.to_thread(threading.Event().wait, 0)


@pytest.fixture
def grammars():
    SEEN.clear()
    RELEASE.clear()
    yield Grammars(TOKENIZER, frozenset({EOS}))
    RELEASE.set()


async def test_equal_grammars_are_compiled_once_and_never_on_the_loop(grammars):
    makes = await asyncio.gather(*(grammars.factory(Counted("a+", name="one")) for _ in range(5)))
    await grammars.factory(Counted("a+", name="one"))
    assert [name for name, _ in SEEN] == ["one"]
    assert SEEN[0][1] is not threading.current_thread()
    assert all(reads(make(), TOKENIZER.encode("aa")) for make in makes)


async def test_every_matcher_of_a_factory_goes_its_own_way(grammars):
    make = await grammars.factory(Regex("ab|cd"))
    one, other = make(), make()
    one.accept(TOKENIZER.encode("a")[0])
    assert has(other.allowed(), TOKENIZER.encode("c")[0])
    assert not has(one.allowed(), TOKENIZER.encode("c")[0])


async def test_what_was_compiled_long_ago_makes_room(grammars, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_CACHED", 2)
    for name in ("one", "two", "one", "three", "one", "two"):
        await grammars.factory(Counted("a", name=name))
    assert [name for name, _ in SEEN] == ["one", "two", "three", "two"]
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", 10)
    for _ in range(2):
        await grammars.factory(Counted("a", name="large"))
    assert [name for name, _ in SEEN][-2:] == ["large", "large"]


async def test_a_failure_reaches_every_waiter_and_is_not_cached(grammars):
    for _ in range(2):
        results = await asyncio.gather(
            *(grammars.factory(Counted("(", name="bad")) for _ in range(3)), return_exceptions=True
        )
        assert [type(result) for result in results] == [GrammarError] * 3
    assert len(SEEN) == 2
    with pytest.raises(ZeroDivisionError):  # a bug of ours is no fault of the client's
        await grammars.factory(Counted("a", name="broken"))


async def test_a_grammar_that_takes_too_long_is_refused_and_others_wait_for_nothing_but_its_thread(
    grammars, monkeypatch
):
    monkeypatch.setattr(compiler, "MAX_COMPILE_S", 0.0)
    with pytest.raises(GrammarError, match="takes longer than 0 s"):
        await grammars.factory(Counted("a", name="held"))
    monkeypatch.setattr(compiler, "MAX_COMPILE_S", 60.0)
    held = asyncio.create_task(grammars.factory(Counted("b", name="held")))  # the second thread
    waiting = asyncio.create_task(grammars.factory(Counted("c", name="quick")))
    await until(lambda: len(SEEN) == 2)
    assert not waiting.done()
    RELEASE.set()
    assert await held
    assert await waiting


async def test_whoever_stops_waiting_takes_nothing_from_the_others(grammars):
    leaves = asyncio.create_task(grammars.factory(Counted("a", name="held")))
    stays = asyncio.create_task(grammars.factory(Counted("a", name="held")))
    await until(lambda: SEEN)
    leaves.cancel()
    RELEASE.set()
    assert await stays
    assert len(SEEN) == 1


class Held(Counted, frozen=True, tag=True):
    """A grammar of any length that is held up."""

    padding: str = ""


async def settled(*tasks) -> None:
    """Until the tasks have come to where they wait."""
    for _ in range(3):
        await asyncio.sleep(0)


def long(name: str) -> Held:
    return Held("a", name=name, padding="x" * compiler.LONG_BYTES)


async def both_threads_held(grammars) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(grammars.factory(Held("a", name="held", padding=str(i)))) for i in range(2)]
    await until(lambda: len(SEEN) == 2)
    return tasks


async def test_what_nobody_waits_for_any_more_is_not_compiled(grammars):
    held = await both_threads_held(grammars)
    leaving = [asyncio.create_task(grammars.factory(Counted("a", name=f"left {i}"), b"a")) for i in range(20)]
    twice = [asyncio.create_task(grammars.factory(Counted("a", name="wanted twice"), b"a")) for _ in range(2)]
    await settled(*leaving, *twice)
    for task in (*leaving, twice[0]):
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    RELEASE.set()
    assert await twice[1]
    await asyncio.gather(*held)
    assert [name for name, _ in SEEN] == ["held", "held", "wanted twice"]


async def test_what_one_caller_has_waiting_is_bounded_and_another_is_served_next(grammars, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_WAITING", 3)
    held = await both_threads_held(grammars)
    greedy = [asyncio.create_task(grammars.factory(Counted("a", name=f"a{i}"), b"a")) for i in range(4)]
    await settled(*greedy)
    with pytest.raises(TooManyRequests):
        await greedy.pop()
    others = [asyncio.create_task(grammars.factory(Counted("a", name=name), name.encode())) for name in "bc"]
    own = [
        asyncio.create_task(grammars.factory(Counted("a", name=f"ours {i}"))) for i in range(5)
    ]  # no caller: no bound
    await settled(*others, *own)
    RELEASE.set()
    await asyncio.gather(*held, *greedy, *others, *own)
    order = [name for name, _ in SEEN][2:]
    assert set(order[:4]) == {"a0", "b", "c", "ours 0"}


async def test_long_grammars_leave_a_thread_to_short_ones(grammars):
    held = asyncio.create_task(grammars.factory(long("held")))
    await until(lambda: SEEN)
    second = asyncio.create_task(grammars.factory(long("second")))
    assert await grammars.factory(Counted("a", name="short"))
    assert [name for name, _ in SEEN] == ["held", "short"]
    RELEASE.set()
    await asyncio.gather(held, second)


async def test_compiled_grammars_are_kept_by_what_they_compile_to(grammars, monkeypatch):
    for _ in range(2):
        await grammars.factory(Counted("a", name="kept"))
    monkeypatch.setattr(compiler, "BYTES_PER_CPU_S", float("1e30"))  # the least work is more than may be kept
    for _ in range(2):
        await grammars.factory(Counted("a", name="large"))
    assert [name for name, _ in SEEN] == ["kept", "large", "large"]


@pytest.mark.parametrize(
    "grammar",
    [JsonSchema({"$ref": "#"}), Alternatives(tuple(f"c{i}" for i in range(12_000)))],
    ids=["at the first", "at the second"],
)
async def test_what_would_fail_at_a_mask_is_refused_when_it_is_compiled(grammars, grammar):
    with pytest.raises(GrammarError):
        await grammars.factory(grammar)


def chain(links: int) -> dict:
    """A schema that refers to itself through as many definitions: recursion for whoever reads it."""
    defs = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(links)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(links): {}}}


async def test_the_deepest_schema_of_the_allowed_size_does_not_overflow_a_stack(grammars):
    make = await grammars.factory(JsonSchema(chain(2900)))
    assert reads(make(), TOKENIZER.encode("[[[]]]"))


async def test_what_fails_at_a_later_mask_is_an_error_of_the_constraint():
    many = "|".join(f'"{number:x}"x' for number in range(0x400, 0xC00))  # more than the library follows at once
    rules = Rules(f'root ::= "a" x "b" x "c" x w\nx ::= "y" x | "z"\nw ::= {many}\n')
    matcher = (await Grammars(TOKENIZER, frozenset({EOS})).factory(rules))()
    for token in TOKENIZER.encode("azbz", add_special_tokens=False):
        assert has(matcher.allowed(), token)
        matcher.accept(token)
    with pytest.raises(ConstraintError, match="items; max is 2000"):  # noqa: PT012
        for token in TOKENIZER.encode("cz400z", add_special_tokens=False):
            matcher.allowed()
            matcher.accept(token)


@pytest.mark.parametrize("fails", [GrammarError("too many"), ValueError("a bug")], ids=["refused", "a bug"])
async def test_what_fails_to_compile_keeps_nothing_of_the_library_s(grammars, monkeypatch, fails):
    """Not even until the next collection of circles, which may be minutes away."""
    made: list[weakref.ref] = []

    class Matcher:
        grammar_from_regex = staticmethod(compiler.llguidance.LLMatcher.grammar_from_regex)

        def __init__(self, *args, **options) -> None:
            made.append(weakref.ref(self))

        def is_error(self) -> bool:
            raise type(fails)(*fails.args)

    grammars.warm()
    monkeypatch.setattr(compiler.llguidance, "LLMatcher", Matcher)
    gc.disable()
    try:
        with contextlib.suppress(type(fails)):
            await grammars.factory(Regex("a"))
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


async def test_memory_of_long_grammars_is_given_back():
    given_back = threading.Event()
    give_back = GiveBack(given_back.set)
    grammars = Grammars(TOKENIZER, frozenset({EOS}), give_back=give_back)
    await grammars.factory(Regex("a"))
    assert give_back._timer is None
    await grammars.factory(long("of many characters"))
    assert give_back._timer is not None
    give_back._start()
    assert await asyncio.to_thread(given_back.wait, 60)


async def test_a_model_without_end_tokens_has_no_structured_outputs():
    with pytest.raises(GrammarError, match="has no end token"):
        await Grammars(TOKENIZER, frozenset()).factory(Regex("a"))


async def test_any_of_the_models_end_tokens_may_follow_a_complete_text_and_nothing_follows_them(grammars):
    make = await Grammars(TOKENIZER, frozenset({EOS, 1})).factory(Regex("ab?"))
    matcher = make()
    assert not has(matcher.allowed(), EOS)
    matcher.accept(TOKENIZER.encode("a")[0])
    mask = matcher.allowed()
    assert {token for token in range(TOKENIZER.vocab_size) if has(mask, token)} == {EOS, 1, TOKENIZER.encode("b")[0]}
    matcher.accept(EOS)
    assert not any(matcher.allowed())


async def test_a_token_that_the_grammar_forbids_is_an_error(grammars):
    matcher = (await grammars.factory(Regex("a")))()
    with pytest.raises(ConstraintError):
        matcher.accept(TOKENIZER.encode("b")[0])


@pytest.mark.parametrize("text", ['{"name": "Zoë 😀", "age": 36}', '{"name":"","age":-1}'])
async def test_a_vocabulary_from_a_gguf_file_reads_what_its_tokenizer_writes(text):
    tokenizer = ours()
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    make = await Grammars(tokenizer, tokenizer.eos_token_ids).factory(JsonSchema(schema))
    assert len(make().allowed()) == 4 * 1536  # 49152 tokens fill their words
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert reads(make(), ids, end=min(tokenizer.eos_token_ids))
    assert not reads(make(), tokenizer.encode(text[:-1], add_special_tokens=False), end=min(tokenizer.eos_token_ids))
