"""Compiler of grammars: converts a grammar to a factory of matchers.

Compilation runs on two threads with large stacks, since a grammar may be deeply recursive. API keys are served in rotation. One
thread is reserved for short grammars, and cancelled work is not started. Results are cached, weighted by compile time. A new
matcher is a copy and takes about 10 us. `warm` builds the library's table of the vocabulary once at start-up, because that holds
the GIL for 0.1 s or more."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import llguidance
import msgspec

from runtime.api import ConstraintError, MatcherFactory, TokenMatcher
from server.generate.structured.closing import may_repeat
from server.generate.structured.grammar import GrammarError, JsonSchema
from server.generate.structured.unique_keys import TokenIndex, UniqueKeys
from server.http.errors import TooManyRequests, clip
from server.http.offload import GiveBack, give_way
from server.models.model import Constraint
from server.models.tokenizer import Tokenizer

MAX_COMPILE_S = 5.0
MAX_FIRST_MASK_S = (
    0.05  # of the thread's own time: every step of its request would take as long, and its neighbours' with it
)
MAX_CACHED = 64
MAX_CACHED_BYTES = 16 << 20  # compiled, as far as that can be told
MIN_BYTES = 1 << 17  # of a compiled grammar, however short
BYTES_PER_CPU_S = (
    64 << 20
)  # of a compiled grammar, by the time that it took: between 10 and 70 MB were seen (1 to 840 ms)
THREADS = 2
LONG_BYTES = 8192  # of a grammar as JSON: whoever has so many may wait for others of the kind
MAX_WAITING = 128  # of one caller, and four times that in all; a program of ours may have any number
RETRY_AFTER_S = 2
STACK_BYTES = 256 << 20  # address space; the deepest grammar that MAX_CHARS allows was seen to take 100 MiB of it

_LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """Compiled grammar. `prototype`: matcher that is copied for every sequence. `index`: vocabulary index, if object keys must
    be distinct. `cpu_s`: compile time in seconds."""

    prototype: llguidance.LLMatcher
    index: TokenIndex | None
    cpu_s: float


class Grammars:
    """Compiler and cache of grammars for one tokenizer. `eos_token_ids`: tokens that are allowed after a complete text. Use it
    from one event loop only."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        give_back: GiveBack | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._num_tokens = max(tokenizer.vocab_size, max(eos_token_ids, default=-1) + 1)
        self._num_mask_bytes = -(-self._num_tokens // 32) * 4
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._index: TokenIndex | None = None
        self._warming = threading.Lock()
        self._num_free, self._num_free_for_long = THREADS, THREADS - 1
        self._waiting: OrderedDict[Hashable, list[_Compilation]] = OrderedDict()  # who is first is next
        self._cache: OrderedDict[bytes, _Compilation] = OrderedDict()
        self._running: set[asyncio.Task[None]] = set()
        self._give_back = give_back or GiveBack()

    def warm(self) -> None:
        """Build the vocabulary table. Do not call this on the event loop while requests are served."""
        with self._warming:
            if self._vocabulary is None:
                ends = sorted(self._eos_token_ids) or [0]  # without any, nothing is ever compiled
                vocabulary = _Vocabulary(self._tokenizer, ends[0])
                self._index = TokenIndex(vocabulary.tokens)
                self._vocabulary = llguidance.LLTokenizer(
                    vocabulary,  # type: ignore[arg-type]  # TokenizerWrapper only wraps the like
                    n_vocab=self._num_tokens,
                    eos_token=ends,
                )

    async def factory(self, grammar: Constraint, caller: bytes | None = None) -> MatcherFactory:
        """Compile `grammar`, or find it in the cache. Return its matcher factory. `caller`: API key for the rotation. Raises
        GrammarError or TooManyRequests."""
        key = msgspec.json.encode(grammar)
        compilation = self._cache.get(key)
        if compilation is None:
            compilation = self._enqueue(key, grammar, caller)
        self._cache.move_to_end(key)
        compilation.num_waiters += 1
        try:
            compiled = await asyncio.shield(compilation.result)
        finally:
            compilation.num_waiters -= 1
            self._drop_unless_waited_for(compilation)
            del compilation  # what it raised has this frame, and would have itself by way of that
        return partial(self._matcher, compiled)

    def _matcher(self, compiled: _Compiled) -> TokenMatcher:
        matcher = GrammarMatcher(compiled.prototype, self._eos_token_ids, self._num_mask_bytes)
        return matcher if compiled.index is None else UniqueKeys(matcher, compiled.index)

    def _enqueue(self, key: bytes, grammar: Constraint, caller: bytes | None) -> _Compilation:
        line = self._waiting.get(caller, [])
        num_waiting = sum(map(len, self._waiting.values()))
        if caller is not None and (len(line) >= MAX_WAITING or num_waiting >= 4 * MAX_WAITING):
            raise TooManyRequests(
                "The server is busy: too many grammars wait to be compiled", retry_after_s=RETRY_AFTER_S
            )
        compilation = _Compilation(key, grammar, caller, asyncio.get_running_loop().create_future())
        compilation.result.add_done_callback(lambda done: self._settle(compilation))
        self._cache[key] = compilation
        self._waiting.setdefault(caller, line).append(compilation)
        self._start()
        return compilation

    def _drop_unless_waited_for(self, compilation: _Compilation) -> None:
        line = self._waiting.get(compilation.caller, [])
        if compilation.num_waiters or compilation not in line:
            return
        line.remove(compilation)
        if not line:
            del self._waiting[compilation.caller]
        compilation.result.cancel()

    def _start(self) -> None:
        while self._num_free and (compilation := self._next()) is not None:
            self._num_free -= 1
            self._num_free_for_long -= compilation.is_long
            running = asyncio.create_task(self._run(compilation))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    def _next(self) -> _Compilation | None:
        for caller, line in self._waiting.items():
            found = next((each for each in line if self._num_free_for_long > 0 or not each.is_long), None)
            if found is None:
                continue
            line.remove(found)
            del self._waiting[caller]
            if line:
                self._waiting[caller] = line  # behind all others
            return found
        return None

    async def _run(self, compilation: _Compilation) -> None:
        work = asyncio.wrap_future(_on_large_stack(partial(self._compile, compilation.grammar)))
        work.add_done_callback(
            lambda done: self._leave(compilation, done)
        )  # it cannot be interrupted, and keeps its place till then
        done, _ = await asyncio.wait({work}, timeout=MAX_COMPILE_S)
        result = compilation.result
        error = work.exception() if done else GrammarError(f"compiling it takes longer than {MAX_COMPILE_S:g} s")
        if error is None:
            compiled = work.result()
            compilation.num_bytes = MIN_BYTES + len(compilation.key) + int(BYTES_PER_CPU_S * compiled.cpu_s)
            result.set_result(compiled)
        else:
            result.set_exception(error)
            result.exception()  # if everybody has left, nobody asks: asyncio would log it as forgotten

    def _leave(self, compilation: _Compilation, work: asyncio.Future[_Compiled]) -> None:
        self._num_free += 1
        self._num_free_for_long += compilation.is_long
        if not work.cancelled():
            work.exception()
        if compilation.is_long:
            self._give_back.soon()  # kept or not, compiling takes several times what is left of it
        self._start()

    def _compile(self, grammar: Constraint) -> _Compiled:
        self.warm()
        assert self._vocabulary is not None
        if not self._eos_token_ids:
            raise GrammarError("the model has no end token, so its output cannot be constrained")
        began_s = time.thread_time()
        matcher = llguidance.LLMatcher(self._vocabulary, grammar.source(self._tokenizer), log_level=0, limits=_LIMITS)
        _check(matcher)
        trial = matcher.deep_copy()
        for _ in range(2):  # some fail at the first mask, and some at the second
            mask_began_s = time.thread_time()
            mask = trial.compute_bitmask()
            _check(trial)
            if time.thread_time() - mask_began_s > MAX_FIRST_MASK_S:
                raise GrammarError("it is too ambiguous: computing its first tokens takes too long")
            first = self._first_token(mask)
            if first is None:
                break
            trial.consume_token(first)
            _check(trial)
        repeats = isinstance(grammar, JsonSchema) and may_repeat(grammar.checked())
        return _Compiled(matcher, self._index if repeats else None, time.thread_time() - began_s)

    def _first_token(self, mask: bytes) -> int | None:
        for at, byte in enumerate(mask):
            for bit in range(8 if byte else 0):
                id = 8 * at + bit
                if byte >> bit & 1 and id not in self._eos_token_ids and id < self._num_tokens:
                    return id
        return None

    def _settle(self, compilation: _Compilation) -> None:
        done, key = compilation.result, compilation.key
        if done.cancelled() or done.exception() is not None:
            self._cache.pop(key, None)
        while len(self._cache) > MAX_CACHED or sum(each.num_bytes for each in self._cache.values()) > MAX_CACHED_BYTES:
            self._cache.popitem(last=False)


class _Compilation:
    """Compilation of one grammar, waiting, running or completed. `num_bytes`: approximate size of the compiled grammar."""

    __slots__ = ("caller", "grammar", "is_long", "key", "num_bytes", "num_waiters", "result")

    def __init__(self, key: bytes, grammar: Constraint, caller: Hashable, result: asyncio.Future[_Compiled]) -> None:
        self.key = key
        self.grammar = grammar
        self.caller = caller
        self.result = result
        self.is_long = len(key) > LONG_BYTES
        self.num_waiters = 0
        self.num_bytes = len(key)


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_error_of(matcher))


def _error_of(matcher: llguidance.LLMatcher) -> str:
    return clip(" ".join(matcher.get_error().split()))


class GrammarMatcher:
    """TokenMatcher that follows a new copy of a compiled grammar."""

    def __init__(self, prototype: llguidance.LLMatcher, eos_token_ids: frozenset[int], num_mask_bytes: int) -> None:
        self._prototype = prototype
        self._matcher = prototype.deep_copy()
        self._eos_token_ids = eos_token_ids
        self._num_mask_bytes = num_mask_bytes
        self._consumed: list[int] = []
        self._complete = False

    def allowed(self) -> bytes:
        if self._complete:
            return b""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ConstraintError(_error_of(self._matcher))
        return mask[: self._num_mask_bytes]  # the library adds a word where the last one is full

    def accept(self, token_id: int) -> None:
        if token_id in self._eos_token_ids:  # which the engine was told to ignore; there is nothing behind it
            self._complete = True
        elif self._matcher.consume_token(token_id):
            self._consumed.append(token_id)
        else:
            raise ConstraintError(_error_of(self._matcher))

    def checkpoint(self) -> Callable[[], None]:
        num_before, complete = len(self._consumed), self._complete

        def take_back() -> None:
            self._complete = complete
            num_more = len(self._consumed) - num_before
            del self._consumed[num_before:]
            if (num_more or self._matcher.is_error()) and not self._matcher.rollback(num_more):
                self._matcher = self._prototype.deep_copy()  # what has failed once does not go back
                self._matcher.consume_tokens(self._consumed)

        return take_back


class _Vocabulary:
    """Adapter of a tokenizer to the interface that llguidance expects."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = tokenizer.all_token_bytes()
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)


def _on_large_stack(work: Callable[[], _Compiled]) -> Future[_Compiled]:
    future: Future[_Compiled] = Future()
    with _STACK_SIZE:  # it is the process' setting, and counts where a thread starts
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=_run, args=(work, future), name="oneloop-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return future


def _run(work: Callable[[], _Compiled], future: Future[_Compiled]) -> None:
    give_way()
    try:
        future.set_result(work())
    except Exception as error:
        # Its frames have the library's objects, and would have it itself by way of the future: a circle that keeps megabytes.
        traceback.clear_frames(error.__traceback__)
        future.set_exception(error)
    except BaseException as error:  # a panic of the library
        future.set_exception(RuntimeError(repr(error)))
    finally:
        del work, future


_STACK_SIZE = threading.Lock()
