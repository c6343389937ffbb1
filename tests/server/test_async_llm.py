"""AsyncLLM: the engine on the caller's own loop, asyncio's or uvloop's."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
import uvloop

from oneloop import AsyncEngineArgs, AsyncLLM, LoadError, RequestOutputKind, SamplingParams
from tests.server.test_llm import fake  # noqa: F401

LOOPS = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


def run(work, loop_factory=None):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(work)


async def texts_of(stream) -> list[str]:
    return [output.outputs[0].text async for output in stream]


@LOOPS
def test_tasks_share_the_engine_of_their_loop(fake, loop_factory):  # noqa: F811
    async def program():
        async with AsyncLLM("tiny") as llm:
            prompts = ["ab", "cd", "ef"]
            params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
            found = await asyncio.gather(
                *(texts_of(llm.generate(prompt, params, f"id-{prompt}")) for prompt in prompts)
            )
            most = fake.most_at_once
        assert fake.engine.closed
        return found, most

    found, most = run(program(), loop_factory)
    assert found == [["AB"], ["CD"], ["EF"]]
    assert most >= 2


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (None, ["A", "AB", "ABC", "ABC"]),
        (RequestOutputKind.CUMULATIVE, ["A", "AB", "ABC", "ABC"]),
        (RequestOutputKind.DELTA, ["A", "B", "C", ""]),
        (RequestOutputKind.FINAL_ONLY, ["ABC"]),
    ],
)
def test_an_iteration_yields_what_its_params_say(fake, kind, texts):  # noqa: F811
    async def program():
        async with AsyncLLM.from_engine_args(AsyncEngineArgs(model="tiny")) as llm:
            outputs = [output async for output in llm.generate("abc", SamplingParams(output_kind=kind), "mine")]
            assert {output.request_id for output in outputs} == {"mine"}
            assert [output.finished for output in outputs] == [False] * (len(texts) - 1) + [True]
            return [output.outputs[0].text for output in outputs]

    assert run(program()) == texts


def test_a_chat_and_its_own_template(fake):  # noqa: F811
    messages = [{"role": "user", "content": "Hi"}]

    async def program():
        async with AsyncLLM("tiny") as llm:
            params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
            own = await texts_of(llm.chat(messages, params))
            return own + await texts_of(llm.chat(messages, params, chat_template="say {{ messages[0].content }}"))

    assert run(program()) == ["USER\nHI\nASSISTANT\n", "SAY HI"]


def test_abort_ends_a_request_with_its_reason_and_no_other(fake):  # noqa: F811
    fake.paused = True

    async def program():
        async with AsyncLLM("tiny") as llm:
            one, other = (asyncio.create_task(last(llm.generate("abc", None, id))) for id in ("one", "other"))
            await until_live(fake, 2)
            await llm.abort(["one", "nobody"])
            aborted = await one
            fake.engine.step(9)
            return aborted, await other

    aborted, whole = run(program())
    assert (aborted.outputs[0].finish_reason, aborted.finished) == ("abort", True)
    assert (whole.outputs[0].finish_reason, whole.outputs[0].text) == ("stop", "ABC")


@pytest.mark.parametrize("way", ["cancel", "break"])
def test_who_leaves_frees_the_sequence(fake, way):  # noqa: F811
    fake.paused = True

    async def program():
        async with AsyncLLM("tiny") as llm:
            task = asyncio.create_task(last(llm.generate("abc"), stop_early=way == "break"))
            await until_live(fake, 1)
            if way == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                fake.engine.step()
                await task
            assert not fake.engine.live

    run(program())


def test_two_requests_cannot_have_one_id(fake):  # noqa: F811
    fake.paused = True

    async def program():
        async with AsyncLLM("tiny") as llm:
            first = asyncio.create_task(last(llm.generate("abc", None, "same")))
            await until_live(fake, 1)
            with pytest.raises(ValueError, match="request_id 'same': another request with this id is in flight"):
                await last(llm.generate("abc", None, "same"))
            await llm.abort("same")
            await first
            again = asyncio.create_task(last(llm.generate("abc", None, "same")))
            await until_live(fake, 1)
            fake.engine.step(9)
            assert (await again).finished

    run(program())


def test_shutdown_ends_what_is_at_work_and_is_known_afterwards(fake):  # noqa: F811
    fake.paused = True

    async def program():
        llm = AsyncLLM("tiny")
        task = asyncio.create_task(last(llm.generate("abc")))
        await until_live(fake, 1)
        await llm.shutdown()
        with pytest.raises(RuntimeError, match="closed before the answer was complete"):
            await task
        assert fake.engine.closed
        assert llm.shutdown().done()
        with pytest.raises(RuntimeError, match="shut down"):
            await last(llm.generate("abc"))

    run(program())


def test_shutdown_of_what_was_never_loaded_does_nothing(fake):  # noqa: F811
    assert AsyncLLM("tiny").shutdown() is None


def test_a_model_that_cannot_load_says_so_at_each_call(fake):  # noqa: F811
    async def program():
        llm = AsyncLLM("broken")
        for _ in range(2):
            with pytest.raises(LoadError, match="truncated"):
                await last(llm.generate("a"))
        await llm.shutdown()

    run(program())


def test_another_loop_is_refused(fake):  # noqa: F811
    llm = AsyncLLM("tiny")
    with asyncio.Runner() as first:
        first.run(llm.get_default_sampling_params())
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            run(llm.get_default_sampling_params())
        first.run(_awaited(llm.shutdown))


async def _awaited(call):
    await call()


async def last(stream, *, stop_early: bool = False):
    found = None
    async with aclosing(stream):
        async for output in stream:
            found = output
            if stop_early:
                break
    return found


async def until_live(fake, num: int) -> None:  # noqa: F811
    while not hasattr(fake, "engine"):  # noqa: ASYNC110
        await asyncio.sleep(0)
    await fake.engine.until(lambda: len(fake.engine.live) == num)
