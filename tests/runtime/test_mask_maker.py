"""Sequences under matchers, through the engine over a FakeRunner: what is drawn, when, and who ends how."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import partial

import pytest

from runtime.api import ConstraintError, FinishReason
from runtime.constrain.masks import mask_of, only_token
from runtime.speculate.ngram import Ngram
from runtime.speculate.speculation import DeviceSpeculation, Speculation
from runtime.speculate.verification_cost import VerificationCost
from tests.fake_runner import FakeRunner, Rule
from tests.invariants import check_pool, check_tables
from tests.runtime.test_engine import engine_on, read, request, turns, value

STOP, LENGTH, ERROR, INVALID = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.INVALID


class Made:
    """A factory that remembers what it made."""

    def __init__(self, rule) -> None:
        self.rule = rule
        self.matchers: list[Rule] = []

    def __call__(self) -> Rule:
        self.matchers.append(Rule(self.rule))
        return self.matchers[-1]


def from_last(ids: list[int]) -> set[int]:
    """What may follow hangs on the last token drawn, and on how many there were."""
    last = ids[-1] if ids else 0
    return {(last * 7 + len(ids) + step) % 900 for step in (1, 2)}


def drawn_by(rule, num: int, first: int) -> list[int]:
    """What FakeRunner draws under `rule`, counting up from position `first`."""
    ids: list[int] = []
    for position in range(first, first + num):
        allowed = rule(ids)
        ids.append(min(allowed, key=lambda token: (token - position) % 1024))
    return ids


async def until(condition) -> None:
    while not condition():
        await turns(1)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
async def test_every_token_obeys_its_matcher_and_the_matcher_sees_every_token(steps_in_flight):
    made = Made(from_last)
    async with engine_on(FakeRunner(), steps_in_flight=steps_in_flight) as engine:
        requests = [request(max_tokens=12, matchers=(made,)), request((5,) * 9, 7, matchers=(made,)), request()]
        got = await read(engine.submit(requests))
    assert got == {
        0: (drawn_by(from_last, 12, 3), LENGTH),
        1: (drawn_by(from_last, 7, 9), LENGTH),
        2: ([3, 4, 5, 6], LENGTH),
    }
    seen = sorted((matcher.ids for matcher in made.matchers), key=len)
    assert seen == [got[1][0][:-1], got[0][0][:-1]]  # the last token ends the sequence: nobody asks what follows


class Slipping:
    """A proposer that knows what is drawn under `from_last` and is wrong about every fourth token."""

    def propose(self, sequence, most):
        num = sequence.num_output_tokens
        right = drawn_by(from_last, num + most, sequence.num_prompt_tokens)[num:]
        return [token + (num + place) % 4 // 3 for place, token in enumerate(right)]

    def finished(self, sequence) -> None:
        pass


@pytest.mark.parametrize("kind", [Speculation, DeviceSpeculation])
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("patient", [True, False])
async def test_drafts_change_no_token_under_a_matcher_and_save_steps(steps_in_flight, patient, kind):
    made = Made(from_last)
    runner = FakeRunner(patient=patient)
    async with engine_on(runner, steps_in_flight=steps_in_flight, speculation=kind(Slipping(), 3)) as engine:
        requests = [request(max_tokens=24, matchers=(made,)), request((5,) * 9, 17, matchers=(made,))]
        got = await read(engine.submit(requests))
        check_pool(engine._scheduler)
    assert got == {0: (drawn_by(from_last, 24, 3), LENGTH), 1: (drawn_by(from_last, 17, 9), LENGTH)}
    seen = sorted((matcher.ids for matcher in made.matchers), key=len)
    assert all(ids == whole[: len(ids)] for ids, whole in zip(seen, (got[1][0], got[0][0]), strict=True))
    if patient:
        assert len([row for batch in runner.batches for row in batch.rows if row.number == 1]) < 14


async def test_beside_drafts_of_the_device_matchers_have_some_of_the_host_and_nobody_else_waits():
    """Of two rows in the same steps, one step ahead."""
    made, runner = Made(from_last), FakeRunner(patient=True)
    speculation = DeviceSpeculation(Slipping(), 3)
    async with engine_on(runner, steps_in_flight=2, speculation=speculation) as engine:
        got = await read(engine.submit([request(max_tokens=24, matchers=(made,)), request((5,) * 9, 40)]))
        check_pool(engine._scheduler)
    assert got[0] == (drawn_by(from_last, 24, 3), LENGTH)
    rows = [{row.number: row for row in batch.rows} for batch in runner.batches]
    masked, others = ([of[number] for of in rows if number in of] for number in (1, 2))
    assert len(masked) < 12
    assert any(row.draft_ids for row in masked)
    assert not any(row.num_proposed or row.guessed_on_device for row in masked)
    assert len(rows) - len(others) <= 1  # while it answers it is in every step
    assert all(row.guessed_on_device for row in others[2:8])


@pytest.mark.parametrize("predictions", [True, False])
async def test_what_a_request_predicts_is_looked_up_by_the_host(predictions):
    async with engine_on(FakeRunner()) as engine:
        plain = await read(engine.submit([request(max_tokens=24)]))
    runner, speculation = FakeRunner(), DeviceSpeculation(Ngram(2, 5), 4, predictions=predictions)
    async with engine_on(runner, steps_in_flight=2, speculation=speculation) as engine:
        found = await read(engine.submit([replace(request(max_tokens=24), prediction=tuple(plain[0][0]))]))
    assert found == plain
    drafted = [row for batch in runner.batches for row in batch.rows if row.draft_ids]
    assert {row.guessed_on_device for row in drafted} == {not predictions}
    assert speculation.num_accepted_tokens > 12


class Clueless:
    def propose(self, sequence, most):
        return []

    def finished(self, sequence) -> None:
        pass


def mostly_forced(ids: list[int]) -> set[int]:
    """Of every eight tokens two are free, and after them only one may follow."""
    place = len(ids) % 8
    return {300 + place + step for step in range(1 if place > 1 else 3)}


@pytest.mark.parametrize("kind", [Speculation, DeviceSpeculation])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("adaptive", [True, False])
async def test_what_alone_may_follow_is_a_draft_whatever_else_is_guessed(steps_in_flight, adaptive, kind):
    runner, made = FakeRunner(patient=True), Made(mostly_forced)
    speculation = kind(Clueless(), 8, VerificationCost(0.01) if adaptive else None)
    async with engine_on(runner, steps_in_flight=steps_in_flight, speculation=speculation) as engine:
        got = await read(engine.submit([request(max_tokens=56, matchers=(made,))]))
        check_pool(engine._scheduler)
    assert got == {0: (drawn_by(mostly_forced, 56, 3), LENGTH)}
    assert speculation.num_accepted_tokens == speculation.num_draft_tokens
    if adaptive:
        assert speculation.num_accepted_tokens > 0
    else:  # of each six the first comes with the mask that tells of the others; the very last one is drawn behind the drafts
        assert speculation.num_accepted_tokens == 7 * 5 - 1
        assert len(runner.batches) == 56 - (7 * 5 - 1)


def test_a_mask_of_one_token_is_told_from_others():
    assert [only_token(mask_of({token}, 3)) for token in (0, 31, 32, 63, 95)] == [0, 31, 32, 63, 95]
    assert [only_token(mask_of(tokens, 3)) for tokens in ((), (1, 2), (31, 32), (0, 95))] == [None] * 4


async def test_what_a_matcher_says_behind_a_guess_counts_only_once_it_is_drawn():
    """It raises, or has nothing to add: where nobody draws the guess that ends nobody, and else as if there had been none."""

    class Sevens:
        def propose(self, sequence, most):
            return [7, 7]

        def finished(self, sequence) -> None:
            pass

    def raises(ids: list[int]) -> None:
        if 7 in ids:
            raise LookupError("there is a seven")

    def ends(ids: list[int]) -> set[int] | None:
        return set() if 7 in ids else None

    ended = []
    for speculation in (None, Speculation(Sevens(), 2)):
        async with engine_on(FakeRunner(), speculation=speculation) as engine:
            requests = [request(max_tokens=30, matchers=(partial(Rule, rule),)) for rule in (raises, ends)]
            ids: list[list[int]] = [[], []]
            last = [None, None]
            async with engine.submit(requests) as stream:
                async for outputs in stream:
                    for output in outputs:
                        ids[output.index] += output.token_ids
                        last[output.index] = output.finish, output.complete, output.error
            ended.append((ids, last))
    assert ended[0] == ended[1]
    assert ended[0][0] == [[3, 4, 5, 6, 7]] * 2
    assert ended[0][1] == [(ERROR, False, "a constraint failed: there is a seven"), (STOP, True, None)]


async def test_the_forward_pass_is_launched_before_the_last_step_has_settled_and_drawn_after():
    runner = FakeRunner(manual=True)
    async with engine_on(runner) as engine:
        stream = engine.submit([request(max_tokens=9, matchers=(lambda: Rule(from_last),)), request(max_tokens=9)])
        await until(lambda: len(runner.batches) == 2)
        await turns(20)
        assert len(runner.sampled) == 1
        assert all(row.token_ids == () for row in runner.batches[1].rows)  # its inputs are still on the device
        runner.events[0].complete()
        await until(lambda: len(runner.sampled) == 2)
        await until(lambda: len(runner.batches) == 3)
        assert len(runner.sampled) == 2
        async with stream:
            pass
        runner.manual = False


async def test_a_prompt_in_pieces_waits_for_no_mask_until_it_samples():
    runner = FakeRunner()
    async with engine_on(runner, budget=9) as engine:
        got = await read(engine.submit([request((7,) * 30, 2, matchers=(lambda: Rule(from_last),))]))
    assert got == {0: (drawn_by(from_last, 2, 30), LENGTH)}
    assert [bool(batch.masked_rows) for batch in runner.batches] == [False] * 3 + [True] * 2


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_preempted_sequences_go_on_where_their_matchers_stand(steps_in_flight):
    async with engine_on(FakeRunner(), num_blocks=16, steps_in_flight=steps_in_flight) as engine:
        requests = [request((9, n), 40, name=str(n), matchers=(lambda: Rule(from_last),)) for n in range(6)]
        got = await read(engine.submit(requests))
        assert value(engine, "num_preemptions") > 0
        check_pool(engine._scheduler)
        check_tables(engine._scheduler)
    assert list(got.values()) == [(drawn_by(from_last, 40, 2), LENGTH)] * 6


async def test_eos_under_a_matcher_is_an_ordinary_stop():
    def two_then_eos(ids):
        return {999} if len(ids) == 2 else {5}

    async with engine_on(FakeRunner()) as engine:
        got = await read(engine.submit([request(max_tokens=9, matchers=(lambda: Rule(two_then_eos),))]))
    assert got == {0: ([5, 5, 999], STOP)}


async def test_a_matcher_with_nothing_to_add_completes_its_sequence():
    async with engine_on(FakeRunner()) as engine:
        requests = [
            request(max_tokens=9, ignore_eos=True, matchers=(lambda: Rule(lambda ids: {7} if len(ids) < 3 else ()),)),
            request(max_tokens=5),
        ]
        outputs = []
        async with engine.submit(requests) as stream:
            async for found in stream:
                outputs += found
        assert value(engine, "request_success", ("finished_reason", "stop")) == 1
    assert [id for output in outputs if output.index == 0 for id in output.token_ids] == [7, 7, 7]
    assert [(output.finish, output.complete) for output in outputs if output.finish and output.index == 0] == [
        (STOP, True)
    ]
    assert [id for output in outputs if output.index == 1 for id in output.token_ids] == [3, 4, 5, 6, 7]


async def test_min_tokens_gives_way_to_a_matcher_that_wants_nothing_but_the_end():
    def end_after(num):
        return lambda: Rule(lambda ids: {999} if len(ids) >= num else {6, 999})

    async with engine_on(FakeRunner()) as engine:
        (got,) = (await read(engine.submit([request(max_tokens=9, min_tokens=6, matchers=(end_after(2),))]))).values()
    assert got == ([6, 6], STOP)


async def test_a_token_must_please_every_matcher_and_the_allowed_ids():
    def even(ids):
        return range(0, 1000, 2)

    def threes(ids):
        return range(0, 1000, 3) if ids else None  # the first may be anything

    matchers = (lambda: Rule(even), lambda: Rule(threes))
    async with engine_on(FakeRunner()) as engine:
        got = await read(
            engine.submit(
                [
                    request(matchers=matchers),
                    request(matchers=matchers, allowed_token_ids=frozenset({20, 21, 90})),
                    request(matchers=(lambda: Rule(lambda ids: None),), allowed_token_ids=frozenset({40})),
                ]
            )
        )
    assert got == {0: ([4, 6, 6, 6], LENGTH), 1: ([20, 90, 90, 90], LENGTH), 2: ([40] * 4, LENGTH)}


async def test_constraints_that_contradict_each_other_are_their_request_s_mistake():
    matchers = (lambda: Rule(lambda ids: {4}), lambda: Rule(lambda ids: {5} if ids else {4}))
    async with engine_on(FakeRunner()) as engine:
        got = await read(engine.submit([request(matchers=matchers), request(max_tokens=6)]))
    assert got == {0: ([4], INVALID), 1: ([3, 4, 5, 6, 7, 8], LENGTH)}


class Broken(Rule):
    def __init__(self, where: str) -> None:
        super().__init__(lambda ids: None)
        self.where = where
        if where == "made":
            raise RuntimeError("no such grammar")

    def allowed(self):
        if self.where == "called":
            raise RuntimeError("too complex")
        return b"123" if self.where == "wrong size" else None

    def accept(self, token_id):
        if self.where == "accepted":
            raise RuntimeError("not in the grammar")


@pytest.mark.parametrize("where", ["made", "called", "accepted", "wrong size"])
async def test_a_matcher_that_fails_ends_its_own_request_only(where):
    async with engine_on(FakeRunner()) as engine:
        requests = [
            request(matchers=(lambda: Broken(where),), name="broken"),
            request(max_tokens=9, matchers=(lambda: Rule(from_last),)),
            request(max_tokens=9),
        ]
        got = await read(engine.submit(requests))
        assert engine.health().ok
        check_pool(engine._scheduler)
    assert got[0][1] is ERROR
    assert len(got[0][0]) == (where == "accepted")
    assert got[1] == (drawn_by(from_last, 9, 3), LENGTH)
    assert got[2] == (list(range(3, 12)), LENGTH)


async def test_a_constraint_that_cannot_be_kept_in_the_middle_of_an_answer_says_why_and_ends_its_own_request_only():
    class Late(Rule):
        def allowed(self):
            if len(self.ids) == 3:
                raise ConstraintError("12001 items; the limit is 2000")
            return super().allowed()

    async with engine_on(FakeRunner()) as engine:
        found = []
        async with engine.submit(
            [request(max_tokens=9, matchers=(lambda: Late(from_last),)), request(max_tokens=9)]
        ) as stream:
            async for outputs in stream:
                found += outputs
        assert value(engine, "request_success", ("finished_reason", "invalid")) == 1
        check_pool(engine._scheduler)
    (late,) = [output for output in found if output.finish is INVALID]
    assert late.error == "12001 items; the limit is 2000"
    tokens = [[token for each in found if each.index == index for token in each.token_ids] for index in (0, 1)]
    assert tokens == [drawn_by(from_last, 3, 3), list(range(3, 12))]


async def test_who_leaves_while_its_mask_is_made_disturbs_nobody():
    called, answer = threading.Event(), threading.Event()

    class Slow(Rule):
        def allowed(self):
            called.set()
            assert answer.wait(60)
            return super().allowed()

    async with engine_on(FakeRunner()) as engine:
        stays = asyncio.create_task(read(engine.submit([request(max_tokens=9)])))
        leaves = engine.submit([request(max_tokens=9, matchers=(lambda: Slow(from_last),))])
        await until(called.is_set)
        async with leaves:
            pass
        answer.set()
        assert await stays == {0: (list(range(3, 12)), LENGTH)}
        check_pool(engine._scheduler)


async def test_a_matcher_that_takes_too_long_ends_its_own_request_and_those_behind_it_are_served(monkeypatch):
    monkeypatch.setattr("runtime.constrain.mask_maker.LIMIT_S", 1e6)
    answer = threading.Event()

    class Stuck(Rule):
        def allowed(self):
            assert len(self.ids) < 2 or answer.wait(60)
            return super().allowed()

    async with engine_on(FakeRunner(patient=False), max_num_seqs=20) as engine:
        usual = request(max_tokens=9, matchers=(lambda: Rule(from_last),))
        stuck = request(max_tokens=9, matchers=(lambda: Stuck(from_last),))
        reading = asyncio.create_task(read(engine.submit([usual, stuck, usual, request(max_tokens=9), *[usual] * 10])))
        await until(lambda: [*engine._requests.by_number] == [2])
        mask_maker = engine._mask_maker
        await until(lambda: (mask := mask_maker._sequences[2].mask) is not None and mask.begun_s is not None)
        monkeypatch.setattr("runtime.constrain.mask_maker.LIMIT_S", 0.0)  # and now it is too long
        mask_maker._watch(mask_maker._sequences[2].mask)
        got = await reading
        assert not answer.is_set()
        answer.set()
        check_pool(engine._scheduler)
    assert got.pop(1) == (drawn_by(from_last, 2, 3), ERROR)
    assert got.pop(3) == (list(range(3, 12)), LENGTH)
    assert list(got.values()) == [(drawn_by(from_last, 9, 3), LENGTH)] * 12


async def test_matchers_never_run_on_the_event_loop():
    threads = set()

    class Noted(Rule):
        def allowed(self):
            threads.add(threading.current_thread())
            return super().allowed()

        def accept(self, token_id):
            threads.add(threading.current_thread())
            super().accept(token_id)

    def make() -> Noted:
        threads.add(threading.current_thread())
        return Noted(from_last)

    async with engine_on(FakeRunner(), max_num_seqs=20) as engine:
        await read(engine.submit([request(matchers=(make,)) for _ in range(20)]))
    assert threads
    assert threading.current_thread() not in threads


async def test_a_step_that_fails_before_the_draw_voids_the_forward_pass_behind_it():
    runner = FakeRunner(manual=True)
    async with engine_on(runner) as engine:
        unlucky = engine.submit([request(name="unlucky", max_tokens=9)])
        await until(lambda: len(runner.sampled) == 2)
        lucky = engine.submit([request(max_tokens=5, name="lucky", matchers=(lambda: Rule(from_last),))])
        runner.events[0].complete()
        await until(lambda: len(runner.batches) == 3)
        assert len(runner.sampled) == 2
        runner.manual = False
        runner.events[1].complete(RuntimeError())
        runner.sampled.append(runner.batches[2])  # given up: it will never be drawn
        assert (await read(unlucky))[0][1] is ERROR
        assert await read(lucky) == {0: (drawn_by(from_last, 5, 3), LENGTH)}
        check_pool(engine._scheduler)


async def test_a_draw_that_cannot_be_launched_ends_its_requests_and_no_others():
    class Short(FakeRunner):
        def _sample(self, sampled, batch, masks):
            if len(self.batches) == 2:
                self.sampled.append(batch)
                raise RuntimeError
            return super()._sample(sampled, batch, masks)

    async with engine_on(Short()) as engine:
        got = await read(engine.submit([request(max_tokens=9, matchers=(lambda: Rule(from_last),))]))
        assert got == {0: (drawn_by(from_last, 1, 3), ERROR)}
        assert await read(engine.submit([request()])) == {0: ([3, 4, 5, 6], LENGTH)}
        assert engine.health().ok
        check_pool(engine._scheduler)


async def test_a_matcher_that_never_answers_shows_in_health():
    answer = threading.Event()

    class Stuck(Rule):
        def allowed(self):
            assert answer.wait(60)
            return super().allowed()

    now = [0.0]
    clock = lambda: now[0]  # noqa: E731
    async with engine_on(FakeRunner(clock=clock), clock=clock) as engine:
        stream = engine.submit([request(matchers=(lambda: Stuck(from_last),))])
        await until(lambda: engine.loop.unsampled is not None)
        assert engine.health().ok
        now[0] += 121.0
        assert "running for" in engine.health().reason
        answer.set()
        await read(stream)
