"""An engine whose stages have a process each, here a thread with a loop of its own: its answers are one process', a step that fails
ends its own requests, and a process that is gone ends the engine, which says which."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import MappingProxyType

import pytest
import torch

from runtime.config import PlanError
from runtime.models.decoder import Decoder
from runtime.parallel.connection import PeerConnection
from runtime.parallel.group import Apart, Gone
from runtime.parallel.links import HostLink, LinkPort
from runtime.parallel.messages import Build, Join, Joined, ModelName
from runtime.runner.runner import ModelRunner
from runtime.start import start_engine
from runtime.start.stage_process import compute_stage
from runtime.weights.rules import WeightsError
from tests.fake_runner import LateMasks, Rule
from tests.runtime.parallel.conftest import quiet
from tests.runtime.parallel.elsewhere import elsewhere
from tests.runtime.parallel.test_stages_of_a_model import VOCAB, answer, options

APART = {"distributed_executor_backend": "ray"}


@pytest.fixture
async def engine(files):
    started = await start_engine(options(**APART), files, quiet, processes=elsewhere(files))
    yield started
    await started.close()


@pytest.fixture
async def alone(files):
    started = await start_engine(options(pipeline_parallel_size=1), files, quiet)
    yield started
    await started.close()


async def test_draws_log_probabilities_and_facts_are_those_of_one_process(alone, engine):
    assert engine.model == alone.model
    for params in (
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 1.0, "seed": 5, "presence_penalty": 1.0, "logit_bias": MappingProxyType({7: 2.0})},
    ):
        expected, theirs, their_prompt, _ = await answer(alone, [3, 4, 5, 6], **params)
        found, ours, our_prompt, error = await answer(engine, [3, 4, 5, 6], **params)
        assert (found, error) == (expected, None)
        assert [len(each) for each in (ours, our_prompt)] == [len(each) for each in (theirs, their_prompt)]
        for mine, other in ((ours, theirs), (our_prompt, their_prompt)):
            assert [[id for id, _ in each.top] for each in mine] == [[id for id, _ in each.top] for each in other]


@pytest.mark.parametrize("late", [False, True])
async def test_constrained_answers_are_those_of_one_process_whenever_their_masks_come(alone, engine, late):
    def next_up(ids):
        return {(ids[-1] + step) % VOCAB for step in (3, 4)} if ids else {50, 60}

    answers = []
    for each in (alone, engine):
        makers = LateMasks(each._scheduler)
        make = makers.rule("r", next_up, VOCAB) if late else lambda: Rule(next_up, VOCAB)
        others = [asyncio.create_task(answer(each, [number, 8], temperature=0.0)) for number in range(3)]
        answers.append(await answer(each, [3, 4, 5], temperature=0.7, seed=3, matchers=(make,)))
        answers.append([await other for other in others])
    assert answers[:2] == answers[2:]
    assert answers[0][3] is None


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_step_that_fails_in_one_process_ends_its_requests_and_no_others(engine, monkeypatch, stage):
    compute, failing = ModelRunner.compute, []

    def in_one_stage(self, step, rows, *more, **named):
        if failing and self._model.spec.stage_of.number == stage:
            failing.pop()
            raise RuntimeError("a kernel failed")
        return compute(self, step, rows, *more, **named)

    monkeypatch.setattr(ModelRunner, "compute", in_one_stage)
    for params in ({}, {"matchers": (lambda: Rule(lambda ids: {5, 6, 7}, VOCAB),)}):
        expected = await answer(engine, [3, 4, 5], temperature=0.0, **params)
        assert expected[3] is None
        failing.append(True)
        *_, error = await answer(engine, [6, 7, 8], temperature=0.0, **params)
        assert error is not None
        assert not failing
        assert await answer(engine, [3, 4, 5], temperature=0.0, **params) == expected


@pytest.mark.parametrize("busy", [False, True])
async def test_a_process_that_is_gone_ends_the_engine_which_says_which(files, monkeypatch, busy):
    processes = elsewhere(files)
    engine = await start_engine(options(**APART), files, quiet, processes=processes)
    compute, inside, go_on = ModelRunner.compute, threading.Event(), threading.Event()

    def stuck(self, *more, **named):
        inside.set()
        assert go_on.wait(20)
        return compute(self, *more, **named)

    if busy:
        monkeypatch.setattr(ModelRunner, "compute", stuck)
        asked = asyncio.create_task(answer(engine, [3, 4, 5]))
        await asyncio.to_thread(inside.wait)
    processes._far[0].connection.abort()
    why = await engine.death()
    assert why.startswith("the device cannot compute any more: ProcessGone (process ")
    assert "127.0.0.1): its connection has ended" in why
    if busy:
        assert (await asked)[3] == why
        go_on.set()
    await engine.close()


async def test_a_stage_that_cannot_be_built_elsewhere_is_what_starting_fails_with(files, monkeypatch):
    build = Decoder.build.__func__

    def broken(cls, spec, *more, **named):
        if spec.stage_of.number == 1:
            raise error
        return build(cls, spec, *more, **named)

    monkeypatch.setattr(Decoder, "build", classmethod(broken))
    for error, raised in ((WeightsError("no such file"), WeightsError), (MemoryError("no room"), PlanError)):
        with pytest.raises(raised, match=str(error)):
            await start_engine(options(**APART), files, quiet, processes=elsewhere(files))


async def test_a_host_with_less_memory_decides_for_all(files, monkeypatch):
    """The second stage plans for fewer blocks than the first."""
    from runtime.start import ranks

    plan, planned = ranks.plan_engine, []

    def fewer(config, *more):
        planned.append(config)
        return plan(options(**APART, num_kv_blocks=64 - 8 * len(planned), max_model_len=100), *more)

    monkeypatch.setattr(ranks, "plan_engine", fewer)
    engine = await start_engine(options(**APART), files, quiet, processes=elsewhere(files))
    try:
        assert engine.model.num_kv_blocks == engine._scheduler.blocks.pool.num_blocks == 48
    finally:
        await engine.close()


async def test_stages_apart_are_for_who_brings_processes(files):
    with pytest.raises(PlanError, match="--distributed-executor-backend ray requires oneloop serve"):
        await start_engine(options(**APART), files, quiet)


def both_ends() -> tuple[HostLink, HostLink]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return HostLink(one, "stage 1 of 2"), HostLink(other, "stage 0 of 2")


def test_what_is_given_is_taken_in_order_and_a_step_that_failed_is_told_between():
    here, there = both_ends()
    large = torch.arange(3 * 30_000.0).reshape(3, -1)
    here.give([torch.tensor([1, 2]), torch.tensor([[0.5]], dtype=torch.bfloat16)])
    here.leave()
    giving = threading.Thread(target=here.give, args=([large, large[:, :5]],))
    giving.start()
    ids, half = torch.empty(2, dtype=torch.int64), torch.empty((1, 1), dtype=torch.bfloat16)
    there.take([ids, half])
    assert (ids.tolist(), half.item()) == ([1, 2], 0.5)
    with pytest.raises(Apart, match="another stage has failed in this step"):
        there.take([ids])
    room = [torch.empty_like(large), torch.empty((3, 5))]
    there.take(room)
    giving.join()
    assert torch.equal(room[0], large)
    assert torch.equal(room[1], large[:, :5])
    here.connection.close()
    with pytest.raises(Gone) as gone:
        there.take([ids])
    assert gone.value.__notes__ == ["stage 0 of 2"]
    there.connection.close()


def test_who_does_not_know_the_secret_is_not_connected():
    ports = [LinkPort("127.0.0.1", b"s" * 32) for _ in range(2)]
    addresses = [port.address for port in ports]
    stranger = socket.create_connection(addresses[1])
    stranger.sendall(b"x" * 38)
    made = [None, None]

    def connect(stage: int) -> None:
        made[stage] = ports[stage].connected(stage, 2, 1, addresses)

    threads = [threading.Thread(target=connect, args=(stage,)) for stage in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stranger.recv(1) == b""
    stranger.close()
    made[0].ways[0].behind.give([torch.tensor([7])])
    room = torch.empty(1, dtype=torch.int64)
    made[1].ways[0].before.take([room])
    assert room.item() == 7
    for port in ports:
        port.close()


def test_a_port_that_is_closed_keeps_nobody_waiting_for_the_others():
    port = LinkPort("127.0.0.1", b"s" * 32)
    raised = []

    def wait() -> None:
        try:
            port.connected(1, 2, 1, [port.address, port.address])
        except OSError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    port.close()
    waiting.join()
    assert raised


async def test_nobody_is_told_the_secret_who_does_not_say_it():
    heard, lost = asyncio.Queue(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def accepted() -> PeerConnection:
        return PeerConnection(
            b"s" * 32, lambda _, message: heard.put_nowait(message), lambda _: lost.set(), connects=False
        )

    server = await loop.create_server(accepted, "127.0.0.1", 0)
    where = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(*where)
    writer.write(b"x" * 32 + b"more")
    assert await reader.read() == b""  # the end
    await lost.wait()
    writer.close()
    _, known = await loop.create_connection(
        lambda: PeerConnection(b"s" * 32, lambda _, message: None, lambda _: None, connects=True),
        *where,
    )
    known.send({"a": MappingProxyType({1: 2.0})})
    assert await heard.get() == {"a": {1: 2.0}}
    assert heard.empty()
    known.close()
    server.close()


async def test_a_stage_that_waits_for_others_ends_with_the_process_in_charge(files):
    """It is told to build, and the first stage never connects."""
    loop, accepted = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def joined(connection: PeerConnection, message: Joined) -> None:
        links = (message.links, message.links)
        connection.send(Build(options(**APART), ModelName(str(files.path), None), links))
        accepted.set_result(connection)

    def connection() -> PeerConnection:
        return PeerConnection(
            b"s" * 32, lambda *came: None if accepted.done() else joined(*came), lambda _: None, connects=False
        )

    server = await loop.create_server(connection, "127.0.0.1", 0)
    stage = asyncio.create_task(compute_stage(Join(1, *server.sockets[0].getsockname(), b"s" * 32)))
    (await accepted).abort()
    await stage
    server.close()
