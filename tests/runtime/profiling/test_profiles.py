"""Profiles of an engine: when they begin and end, what is in the file, and what goes wrong."""

from __future__ import annotations

import gzip
import json
import sys
import threading

import pytest

from runtime.api import ProfileError, StepRecord
from runtime.profiling import trace
from runtime.profiling.recorder import TorchRecorder
from runtime.profiling.stacks import ObservedCall, StackSampler, calls
from tests.fake_runner import FakeRunner
from tests.runtime.test_engine import engine_on, read, request


class NotedRecorder:
    """Notes its calls; `fails` at one of them."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.steps: list[StepRecord] = []

    def start(self, thread_id):
        self.thread_id = thread_id
        self._note("start")

    def stop(self):
        self._note("stop")

    def write(self, path, steps):
        self._note("write")
        self.steps = list(steps)
        path.write_text("a trace")

    def _note(self, call):
        self.calls.append(call)
        self.threads.add(threading.get_ident())
        if call == self.fails:
            raise OSError(f"no {call}")


async def test_a_profile_has_the_steps_between_its_begin_and_its_end(tmp_path):
    recorder = NotedRecorder()
    async with engine_on(FakeRunner(), recorder=lambda: recorder) as engine:
        await read(engine.submit([request()]))
        await engine.start_profile(tmp_path / "p")
        await read(engine.submit([request(max_tokens=3)]))
        assert recorder.calls == ["start"]
        assert await engine.stop_profile() == tmp_path / "p"
        assert recorder.calls == ["start", "stop", "write"]
        assert [step.number for step in recorder.steps] == [5, 6, 7]
        assert recorder.thread_id == threading.get_ident()
        assert len(recorder.threads) == 1
        assert threading.get_ident() not in recorder.threads


async def test_a_profile_of_so_many_steps_ends_by_itself(tmp_path):
    recorder, runner = NotedRecorder(), FakeRunner(manual=True)
    async with engine_on(runner, recorder=lambda: recorder, steps_in_flight=1) as engine:
        await engine.start_profile(tmp_path / "p", num_steps=2)
        async with engine.submit([request(max_tokens=9)]) as stream:
            answers = aiter(stream)
            for number in range(5):
                runner.launched.clear()
                if len(runner.events) <= number:
                    await runner.launched.wait()
                runner.events[number].complete()
                await anext(answers)
            assert await engine.stop_profile() == tmp_path / "p"
    assert [step.number for step in recorder.steps][:2] == [1, 2]
    assert len(recorder.steps) < 5


async def test_a_delayed_profile_begins_when_those_steps_have_settled(tmp_path):
    recorder = NotedRecorder()
    async with engine_on(FakeRunner(), recorder=lambda: recorder) as engine:
        await engine.start_profile(tmp_path / "p", delay_steps=3)
        assert not recorder.calls
        await read(engine.submit([request(max_tokens=4)]))
        await engine.stop_profile()
        assert recorder.calls == ["start", "stop", "write"]
        assert all(step.number > 3 for step in recorder.steps)


async def test_there_is_one_at_a_time_and_one_to_end(tmp_path):
    async with engine_on(FakeRunner(), recorder=NotedRecorder) as engine:
        with pytest.raises(ProfileError, match="no profile"):
            await engine.stop_profile()
        await engine.start_profile(tmp_path / "p")
        with pytest.raises(ProfileError, match="already"):
            await engine.start_profile(tmp_path / "q")
        await engine.stop_profile()
        await engine.start_profile(tmp_path / "q")
    assert (tmp_path / "q").exists()  # closing the engine ends it


@pytest.mark.parametrize("fails", ["start", "stop", "write"])
async def test_what_goes_wrong_is_told_and_harms_nothing_else(tmp_path, fails):
    async with engine_on(FakeRunner(), recorder=lambda: NotedRecorder(fails)) as engine:

        async def profile():
            await engine.start_profile(tmp_path / "p")
            await engine.stop_profile()

        with pytest.raises(ProfileError, match=f"no {fails}"):
            await profile()
        assert (await read(engine.submit([request()])))[0][0] == [3, 4, 5, 6]
        with pytest.raises(ProfileError, match="no profile"):
            await engine.stop_profile()


async def test_an_engine_without_a_recorder_says_so(tmp_path):
    async with engine_on(FakeRunner()) as engine:
        with pytest.raises(ProfileError, match="does not support profiling"):
            await engine.start_profile(tmp_path / "p")


# --- stacks -------------------------------------------------------------------------------------------------------


def test_calls_last_as_long_as_they_are_seen():
    found = calls([(10, ("a", "b")), (20, ("a", "b", "c")), (30, ("a", "d")), (40, ())])
    assert found == [
        ObservedCall("a", 10, 40, 0),
        ObservedCall("b", 10, 30, 1),
        ObservedCall("c", 20, 30, 2),
        ObservedCall("d", 30, 40, 1),
    ]
    assert calls([]) == []
    assert calls([(5, ("a",))]) == [ObservedCall("a", 5, 5, 0)]


def test_a_thread_is_seen_where_it_waits_and_the_switch_interval_comes_back():
    go_on, usual = threading.Event(), sys.getswitchinterval()

    def where_it_waits():
        go_on.wait()

    thread = threading.Thread(target=where_it_waits)
    thread.start()
    sampler = StackSampler(thread.ident, period_s=0)
    while not any("where_it_waits" in name for _, stack in [*sampler._samples] for name in stack):
        pass
    found = sampler.stop()
    go_on.set()
    thread.join()
    assert any("where_it_waits (profiling/test_profiles.py:" in call.name for call in found)
    assert sys.getswitchinterval() == usual


# --- the file -----------------------------------------------------------------------------------------------------


def events_of(path) -> list[dict]:
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def test_events_of_our_own_stand_among_torchs_at_the_same_clock(tmp_path):
    path, of_torch = tmp_path / "p", tmp_path / "torch.json"
    of_torch.write_text('{"baseTimeNanoseconds": 1000, "traceEvents": [\n{"ph": "X", "name": "aten::mm"}], "x": 1}')
    step = StepRecord(7, 2.0, 3.0, 12, 4, 0, True, None)
    trace.write(path, of_torch, [ObservedCall("f", 6000, 8000, 0)], [step], epoch_ns=-1_999_990_000)
    events = events_of(path)
    assert events[-1]["name"] == "aten::mm"
    (call,) = (event for event in events if event.get("cat") == "python")
    assert (call["name"], call["ts"], call["dur"]) == ("f", 5.0, 2.0)
    begin, end = (event for event in events if event.get("cat") == "step")
    assert begin["name"] == "step 7: 12 prompt tokens, 4 decodes (graph)"
    assert (begin["ph"], begin["ts"]) == ("b", 9.0)
    assert (end["ph"], end["ts"]) == ("e", 1_000_009.0)


def test_what_is_no_trace_is_refused_and_nothing_is_left(tmp_path):
    of_torch = tmp_path / "torch.json"
    of_torch.write_text("{}")
    with pytest.raises(trace.NoTrace):
        trace.write(tmp_path / "p", of_torch, [], [], 0)
    assert [*tmp_path.iterdir()] == [of_torch]


def test_torchs_operators_of_every_thread_are_in_it(tmp_path):
    import torch

    recorder = TorchRecorder("cpu")
    recorder.start(threading.get_ident())
    thread = threading.Thread(target=lambda: torch.ones(3).cumsum(0))
    thread.start()
    thread.join()
    recorder.stop()
    recorder.write(tmp_path / "p", [])
    events = events_of(tmp_path / "p")
    (seen,) = (event for event in events if event["name"] == "aten::cumsum")
    assert next(event["args"]["name"] for event in events if event["name"] == "process_name") == "oneloop"
    assert seen["tid"] == thread.native_id
    assert [*tmp_path.iterdir()] == [tmp_path / "p"]
