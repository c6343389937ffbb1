"""Models that take turns: who is let in, who makes room, and what becomes of requests whose model cannot come."""

from __future__ import annotations

import asyncio

import pytest

from runtime.api import QueueFull, SleepLevel
from server.http.call import Call
from server.http.errors import DeadlineExceeded, ModelFailed, Unavailable
from server.models.lifecycle import Lifecycle
from tests.server.swapping import Turns, until


async def turns(letters: str = "ab", **options) -> Turns:
    made = Turns(letters, **options)
    await made.begin()
    return made


async def in_line(made: Turns, letter: str, num: int = 1) -> None:
    await until(lambda: len(made[letter].waiting) == num)


# --- whose turn it is -----------------------------------------------------------------------------------------------


async def never():
    pytest.fail("it waited")


async def test_what_is_loaded_is_entered_without_waiting():
    made = await turns()
    call = Call(receive=never)
    await made["a"].enter(call)
    await made["a"].enter(call)  # which it has already
    assert made["a"].num_users == 1
    call.end()
    assert made["a"].num_users == 0


async def test_another_one_comes_when_the_requests_of_the_first_have_ended_and_that_takes_no_new_ones():
    made = await turns()
    running = made.ask("a")
    await running.enters()
    other = made.ask("b")
    await in_line(made, "b")
    late = made.ask("a")
    await in_line(made, "a")
    await until(lambda: made.states == "(A) unlo")
    assert made.sources["b"].num_loaded == 0, "nobody was cut off"
    await running.leave()
    await other.enters()
    assert made.sources["a"].engine.sleep_level == SleepLevel.HOST
    await other.leave()
    await late.enters()
    assert (made.sources["a"].engine.sleep_level, made.sources["b"].engine.sleep_level) == (0, SleepLevel.HOST)
    await late.leave()
    assert made.sources["a"].num_loaded == 1, "its engine was woken, not made anew"


async def test_all_who_wait_for_a_model_enter_together_and_then_the_other_has_its_turn():
    made = await turns()
    first = made.ask("a")
    await first.enters()
    others = [made.ask("b") for _ in range(5)]
    await in_line(made, "b", 5)
    again = [made.ask("a") for _ in range(3)]
    await in_line(made, "a", 3)
    await first.leave()
    for each in others:
        await each.enters()
    assert not any(each.is_inside for each in again)
    for each in others:
        await each.leave()
    for each in again:
        await each.enters()
        await each.leave()
    assert (made["a"].num_swaps, made["b"].num_swaps) == (1, 1)


async def test_a_model_stays_open_for_as_long_as_the_last_swap_took():
    made = await turns()
    made.sources["b"].may_load.clear()
    other = made.ask("b")
    await until(lambda: made.sources["b"].num_loaded)
    made.timers.pass_s(20)
    made.sources["b"].may_load.set()
    await other.enters()
    waiting = made.ask("a")
    await in_line(made, "a")
    await until(lambda: made.timers.due)
    made.timers.pass_s(19)
    more = made.ask("b")
    await more.enters()  # though somebody waits for the other
    made.timers.pass_s(1)
    await until(lambda: made.states == "unlo (B)")
    assert not waiting.is_inside
    await more.leave()
    await other.leave()
    await waiting.enters()
    await waiting.leave()


async def test_one_that_has_nothing_to_do_makes_room_at_once():
    made = await turns()
    made.sources["b"].may_load.clear()
    other = made.ask("b")
    await until(lambda: made.sources["b"].num_loaded)
    made.timers.pass_s(20)
    made.sources["b"].may_load.set()
    await other.enters()
    await other.leave()
    back = made.ask("a")
    await back.enters()
    await back.leave()


async def test_of_several_the_one_used_least_lately_makes_room():
    made = await turns("abc", max_loaded=2)
    for letter in "ba":
        caller = made.ask(letter)
        await caller.enters()
        await caller.leave()
    assert made.states == "A B unlo"
    third = made.ask("c")
    await third.enters()
    assert made.states == "A unlo C"
    await third.leave()


async def test_of_several_one_that_is_idle_makes_room_before_one_that_is_not():
    made = await turns("abc", max_loaded=2)
    busy, idle = made.ask("a"), made.ask("b")
    await busy.enters()
    await idle.enters()
    await idle.leave()
    third = made.ask("c")
    await third.enters()
    assert made.states == "A unlo C"
    for each in (busy, third):
        await each.leave()


async def test_files_are_read_while_the_other_still_takes_requests():
    made = await turns("abc")
    made.sources["b"].may_prepare.clear()
    downloads = made.ask("b")
    await until(lambda: made.sources["b"].num_prepared)
    call = Call(receive=never)
    await made["a"].enter(call)
    call.end()
    third = made.ask("c")
    await third.enters()  # nor does it keep another one waiting
    await third.leave()
    made.sources["b"].may_prepare.set()
    await downloads.enters()
    await downloads.leave()


async def test_weights_are_dropped_where_they_are_not_to_be_kept():
    made = await turns(level=SleepLevel.DROPPED)
    other = made.ask("b")
    await other.enters()
    assert made.sources["a"].engine.sleep_level == SleepLevel.DROPPED
    await other.leave()


async def test_who_is_woken_on_the_way_to_sleep_is_put_to_sleep_again(monkeypatch):
    made = await turns()
    engine, slept = made.sources["a"].engine, []
    sleep = engine.sleep

    async def overruled(level):
        slept.append(level)
        if len(slept) > 1:
            await sleep(level)

    monkeypatch.setattr(engine, "sleep", overruled)
    other = made.ask("b")
    await other.enters()
    assert len(slept) == 2
    await other.leave()


# --- who leaves -----------------------------------------------------------------------------------------------------


async def test_when_those_who_wait_have_left_the_first_takes_requests_again():
    made = await turns()
    running = made.ask("a")
    await running.enters()
    other = made.ask("b")
    await until(lambda: made.states == "(A) unlo")
    other.task.cancel()
    await until(other.task.done)
    late = made.ask("a")
    await late.enters()
    assert (made.states, made.sources["b"].num_loaded) == ("A unlo", 0)
    for each in (running, late):
        await each.leave()


async def test_who_leaves_takes_his_own_place_out_of_the_line_and_nobody_elses():
    made = await turns("abc")
    running = made.ask("a")
    await running.enters()
    first = made.ask("b")
    await in_line(made, "b")
    second = made.ask("c")
    await in_line(made, "c")
    gone = made.ask("b")
    await in_line(made, "b", 2)
    gone.task.cancel()
    await until(gone.task.done)
    await running.leave()
    await first.enters()
    assert not second.is_inside, "the first of the line is still the first"
    await first.leave()
    await second.enters()
    await second.leave()


async def test_who_leaves_while_its_model_is_loading_leaves_it_to_others():
    made = await turns()
    made.sources["b"].may_load.clear()
    gone, stays = made.ask("b"), made.ask("b")
    await until(lambda: made.sources["b"].num_loaded)
    gone.task.cancel()
    await until(gone.task.done)
    made.sources["b"].may_load.set()
    await stays.enters()
    assert made["b"].num_users == 1
    await stays.leave()
    assert made["b"].num_users == 0


async def test_who_leaves_in_the_moment_it_is_let_in_does_not_keep_the_model():
    made = await turns()
    made.sources["b"].may_load.clear()
    gone = made.ask("b")
    await until(lambda: made.sources["b"].num_loaded)
    made.sources["b"].may_load.set()
    await until(lambda: made["b"].num_users)
    gone.task.cancel()
    await until(gone.task.done)
    assert made["b"].num_users == 0


# --- models that cannot come ----------------------------------------------------------------------------------------


async def test_one_whose_files_are_missing_costs_nobody_else_anything():
    made = await turns()
    made.sources["b"].missing = "there is no such folder"
    running = made.ask("a")
    await running.enters()
    with pytest.raises(ModelFailed, match="'b' could not be loaded: there is no such folder"):
        await made.ask("b").task
    assert (made.states, made.sources["a"].engine.sleep_level) == ("A unlo", 0)
    await running.leave()


async def test_after_one_that_is_broken_the_former_comes_back_by_itself():
    made = await turns()
    made.sources["b"].broken = "its weights are torn"
    asked = [made.ask("b") for _ in range(2)]
    for each in asked:
        with pytest.raises(ModelFailed, match="its weights are torn"):
            await each.task
    await until(lambda: made.states == "A unlo")
    assert (made.sources["a"].engine.sleep_level, made["b"].num_failures) == (0, 1)


async def test_one_that_is_broken_is_tried_again_after_a_while_and_less_and_less_often():
    made = await turns()
    source = made.sources["b"]
    source.broken = "its weights are torn"
    for wait_s in (60, 120):
        with pytest.raises(ModelFailed):
            await made.ask("b").task
        num = source.num_loaded
        made.timers.pass_s(wait_s - 1)
        with pytest.raises(ModelFailed) as refused:
            await made.ask("b").task
        assert (source.num_loaded, refused.value.headers()["retry-after"]) == (num, "1")
        made.timers.pass_s(1)
    source.broken = None
    mended = made.ask("b")
    await mended.enters()
    assert (made["b"].failure, source.num_prepared) == (None, 3)
    await mended.leave()


async def test_where_neither_can_be_loaded_the_requests_of_both_are_told():
    made = await turns()
    made.sources["b"].broken = "torn"
    made.sources["a"].engine.unhealthy = "its files are gone"
    with pytest.raises(ModelFailed, match="torn"):
        await made.ask("b").task
    with pytest.raises(ModelFailed, match="its files are gone"):
        await made.ask("a").task


# --- limits ---------------------------------------------------------------------------------------------------------


async def test_who_waits_is_told_when_its_time_is_over():
    made = await turns()
    running = made.ask("a")
    await running.enters()
    with pytest.raises(DeadlineExceeded):
        await made.ask("b", deadline_s=made.timers.now_s).task
    hurried, patient = made.ask("b", deadline_s=made.timers.now_s + 5), made.ask("b")
    await in_line(made, "b", 2)
    made.timers.pass_s(5)
    with pytest.raises(DeadlineExceeded):
        await hurried.task
    await running.leave()
    await patient.enters()
    await patient.leave()


async def test_nobody_waits_longer_than_the_queue_time():
    made = await turns(max_wait_s=3.0)
    running = made.ask("a")
    await running.enters()
    asked = made.ask("b", deadline_s=made.timers.now_s + 5)
    await in_line(made, "b")
    made.timers.pass_s(3)
    with pytest.raises(Unavailable, match="waited too long for its model"):
        await asked.task
    await running.leave()


async def test_the_line_is_bounded_and_who_fills_it_fills_it_for_himself():
    made = await turns(max_waiting=4)
    running = made.ask("a")
    await running.enters()

    def ask_as(caller: bytes):
        return made.ask("b", call=Call(shares_as=caller))

    greedy = [ask_as(b"greedy") for _ in range(4)]
    await in_line(made, "b", 4)
    with pytest.raises(QueueFull, match="4 requests are waiting"):
        await ask_as(b"greedy").task
    modest = ask_as(b"modest")
    await in_line(made, "b", 5)
    await running.leave()
    for each in (*greedy, modest):
        await each.enters()
        await each.leave()


# --- the end --------------------------------------------------------------------------------------------------------


async def test_who_waits_when_the_server_ends_is_told():
    made = await turns()
    running = made.ask("a")
    await running.enters()
    asked = made.ask("b")
    await in_line(made, "b")
    made.swaps.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await asked.task
    with pytest.raises(Unavailable, match="shutting down"):
        await made.ask("b").task
    await running.leave()


async def test_an_engine_that_was_loaded_later_is_missed_when_it_dies():
    made = Turns("ab")
    lifecycle = Lifecycle()
    lifecycle.ready(await made.begin())
    death = asyncio.create_task(lifecycle.death())
    other = made.ask("b")
    await other.enters()
    await until(lambda: len([task for task in asyncio.all_tasks() if task.get_name() == "death"]) == 2)
    made.sources["b"].engine.die("the device is lost")
    assert await death == "the device is lost"
    await other.leave()
