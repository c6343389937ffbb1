"""Compiling: once for equal grammars, off the event loop, within limits, and never the end of the server."""

from __future__ import annotations

import asyncio
import threading

import pytest

from server.structured import compiler
from server.structured.compiler import Grammars
from server.structured.grammar import GrammarError, JsonSchema, Regex
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


async def test_a_failure_is_told_to_everybody_and_not_kept(grammars):
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


def chain(links: int) -> dict:
    """A schema that refers to itself through as many definitions: recursion for whoever reads it."""
    defs = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(links)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(links): {}}}


async def test_the_deepest_schema_of_the_allowed_size_does_not_overflow_a_stack(grammars):
    make = await grammars.factory(JsonSchema(chain(2900)))
    assert reads(make(), TOKENIZER.encode("[[[]]]"))


async def test_a_model_without_end_tokens_has_no_structured_outputs():
    with pytest.raises(GrammarError, match="no token that could end"):
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
    with pytest.raises(RuntimeError):
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
