"""Compiled grammars: from a Grammar to the factory of matchers that holds a sequence to it.

Compiling runs on threads with large stacks, two at a time, since a grammar may refer to itself as deeply as it is long; what was
compiled is kept for whoever sends the same again. A fresh matcher is a copy, some ten microseconds. The library's table of the
vocabulary is made once, by `warm`: that holds the interpreter for a tenth of a second or more, so it belongs into start-up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import llguidance
import msgspec

from runtime.api import MatcherFactory
from server.errors import clip
from server.loaded.model import Grammar
from server.loaded.tokenizer import Tokenizer
from server.structured.grammar import GrammarError

MAX_COMPILE_S = 5.0
MAX_FIRST_MASK_S = (
    0.05  # of the thread's own time: every step of its request would take as long, and its neighbours' with it
)
MAX_CACHED = 64
MAX_CACHED_BYTES = 2 << 20  # of grammars as JSON; compiled they are up to a hundred times as large
THREADS = 2
STACK_BYTES = 256 << 20  # address space; the deepest grammar that MAX_CHARS allows was seen to take 100 MiB of it

_LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


class Grammars:
    """Compiles grammars for one tokenizer. `eos_token_ids`: what may follow a text that is complete. Belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._num_tokens = max(tokenizer.vocab_size, max(eos_token_ids, default=-1) + 1)
        self._num_mask_bytes = -(-self._num_tokens // 32) * 4
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._warming = threading.Lock()
        self._slots = asyncio.Semaphore(THREADS)
        self._cache: OrderedDict[bytes, asyncio.Future[llguidance.LLMatcher]] = OrderedDict()

    def warm(self) -> None:
        """Not on the event loop, if anybody waits for that."""
        with self._warming:
            if self._vocabulary is None:
                ends = sorted(self._eos_token_ids) or [0]  # without any, nothing is ever compiled
                self._vocabulary = llguidance.LLTokenizer(
                    _Vocabulary(self._tokenizer, ends[0]),  # type: ignore[arg-type]  # TokenizerWrapper only wraps the like
                    n_vocab=self._num_tokens,
                    eos_token=ends,
                )

    async def factory(self, grammar: Grammar) -> MatcherFactory:
        """Raises GrammarError."""
        key = msgspec.json.encode(grammar)
        compiled = self._cache.get(key)
        if compiled is None:
            compiled = self._cache[key] = asyncio.ensure_future(self._compiled(grammar))
            compiled.add_done_callback(lambda done: self._settle(key, done))
        self._cache.move_to_end(key)
        prototype = await asyncio.shield(compiled)
        return lambda: GrammarMatcher(prototype.deep_copy(), self._eos_token_ids, self._num_mask_bytes)

    async def _compiled(self, grammar: Grammar) -> llguidance.LLMatcher:
        await self._slots.acquire()
        work = asyncio.wrap_future(_on_large_stack(lambda: self._compile(grammar)))
        work.add_done_callback(self._leave)  # it cannot be interrupted, and keeps its place till then
        try:
            return await asyncio.wait_for(asyncio.shield(work), MAX_COMPILE_S)
        except TimeoutError:
            raise GrammarError(f"compiling it takes longer than {MAX_COMPILE_S:g} s") from None

    def _leave(self, work: asyncio.Future[llguidance.LLMatcher]) -> None:
        self._slots.release()
        if not work.cancelled():
            work.exception()  # of what took too long nobody asks: asyncio would log it as forgotten

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        self.warm()
        assert self._vocabulary is not None
        if not self._eos_token_ids:
            raise GrammarError("the model has no token that could end a text of a given form")
        matcher = llguidance.LLMatcher(self._vocabulary, grammar.source(self._tokenizer), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(clip(" ".join(matcher.get_error().split())))
        began_s = time.thread_time()
        matcher.deep_copy().compute_bitmask()
        if time.thread_time() - began_s > MAX_FIRST_MASK_S:
            raise GrammarError("it is too ambiguous: to say what may come first takes too long")
        return matcher

    def _settle(self, key: bytes, done: asyncio.Future[llguidance.LLMatcher]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._cache.pop(key, None)
        while len(self._cache) > MAX_CACHED or sum(map(len, self._cache)) > MAX_CACHED_BYTES:
            self._cache.popitem(last=False)


class GrammarMatcher:
    """A TokenMatcher over a fresh copy of a compiled grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_token_ids: frozenset[int], num_mask_bytes: int) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_mask_bytes = num_mask_bytes
        self._complete = False

    def allowed(self) -> bytes:
        if self._complete:
            return b""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error())
        return mask[: self._num_mask_bytes]  # the library adds a word where the last one is full

    def accept(self, token_id: int) -> None:
        if token_id in self._eos_token_ids:  # which the engine was told to ignore; there is nothing behind it
            self._complete = True
        elif not self._matcher.consume_token(token_id):
            raise RuntimeError(self._matcher.get_error())


class _Vocabulary:
    """A Tokenizer as llguidance wants it."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)


def _on_large_stack(work: Callable[[], llguidance.LLMatcher]) -> Future[llguidance.LLMatcher]:
    future: Future[llguidance.LLMatcher] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # a panic of the library
            future.set_exception(RuntimeError(repr(error)))

    with _STACK_SIZE:  # it is the process' setting, and counts where a thread starts
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="oneloop-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return future


_STACK_SIZE = threading.Lock()
