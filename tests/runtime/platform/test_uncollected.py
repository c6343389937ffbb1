"""While steps are captured, on however many threads, nothing is collected."""

from __future__ import annotations

import gc

from runtime.platform.capture import Uncollected


def test_collections_come_back_with_the_last_that_leaves():
    block = Uncollected()
    assert gc.isenabled()
    block.__enter__()
    with block:
        assert not gc.isenabled()
    assert not gc.isenabled()
    block.__exit__()
    assert gc.isenabled()


def test_who_had_turned_collections_off_finds_them_off():
    gc.disable()
    try:
        with Uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
