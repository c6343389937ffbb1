"""Threads beside the event loop give way to those that compute steps, and to the event loop itself."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from server.generate.structured import compiler
from server.http import offload
from server.http.offload import NICENESS, SHORT_CHARS, SWITCH_S, TURNS_A_STEP, Offload, switch_quickly


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="priorities are a process', not a thread's")
async def test_threads_for_texts_and_grammars_give_way_and_no_other_does():
    usual, offload = niceness(), Offload()
    try:
        assert await offload.run(SHORT_CHARS, niceness) == usual
        assert await offload.run(SHORT_CHARS + 1, niceness) == max(usual, NICENESS)
        assert compiler._on_large_stack(niceness).result(60) == max(usual, NICENESS)
    finally:
        offload.close()
    assert niceness() == usual


def test_where_priorities_are_a_process_nobody_gives_way(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "setpriority", None)
    offload.give_way()


def test_the_interpreter_changes_threads_often_and_never_less_often_than_it_did():
    usual = sys.getswitchinterval()
    try:
        switch_quickly()
        assert sys.getswitchinterval() == pytest.approx(min(usual, SWITCH_S))
        sys.setswitchinterval(1e-5)
        switch_quickly()
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(usual)


def test_a_step_beside_a_text_waits_for_the_interpreter_for_a_millisecond_in_all():
    assert TURNS_A_STEP * SWITCH_S <= 0.001
