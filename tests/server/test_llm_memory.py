"""What an LLM holds while it is open, and that nothing of it stays: in objects and threads, not in an allocator's pages."""

from __future__ import annotations

import gc
import threading
from collections import Counter

import pytest

from runtime.engine import Engine
from runtime.kv.kv_cache import KVCache
from runtime.models.decoder import Decoder
from runtime.scheduler import Scheduler
from server import LLM, SamplingParams
from server.models.tokenizer import Tokenizer

KINDS = (Engine, Scheduler, KVCache, Decoder, Tokenizer)


def alive() -> Counter[str]:
    """How many there are of each of KINDS."""
    return Counter(type(thing).__name__ for thing in gc.get_objects() if issubclass(type(thing), KINDS))


def threads() -> set[threading.Thread]:
    """Those of Python; ours and those that asyncio makes for us."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(("oneloop", "asyncio"))}


@pytest.mark.nightly
def test_close_leaves_nothing_of_what_was_loaded_though_the_llm_is_still_referred_to():
    gc.collect()
    objects, running = alive(), threads()
    llm = LLM("smollm2-135m-instruct", kv_cache_memory="8MiB")
    llm.generate(["Hello", "there"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert all((alive() - objects)[kind.__name__] for kind in KINDS)  # or they would be counted in vain
    llm.close()
    assert alive() == objects
    assert threads() == running


@pytest.fixture
def _nothing_is_frozen():
    """What is frozen is left out of `gc.get_objects`, and sleeping freezes again what it found frozen."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("_nothing_is_frozen")
@pytest.mark.nightly
def test_one_that_sleeps_has_neither_weights_nor_cache_and_says_the_same_when_it_wakes():
    gc.collect()
    objects, greedy = alive(), SamplingParams(temperature=0, max_tokens=8)
    with LLM("smollm2-135m-instruct", kv_cache_memory="8MiB") as llm:
        (before,) = llm.generate(["The sky is"], greedy, use_tqdm=False)
        for level in (1, 2):
            loaded = alive() - objects
            assert (loaded["KVCache"], loaded["Decoder"]) == (1, 1)
            llm.sleep(level)
            left = alive() - objects
            assert (left["KVCache"], left["Decoder"]) == (0, 0)
            (after,) = llm.generate(["The sky is"], greedy, use_tqdm=False)
            assert after.outputs[0].token_ids == before.outputs[0].token_ids
        llm.sleep()
        llm.wake_up()
        assert (alive() - objects)["KVCache"] == 1
