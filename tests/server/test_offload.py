"""Long texts leave the loop, short ones do not pay for the trip; and who shares the threads with whom."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from functools import partial

import pytest

from server.api.pooling import pooled, run
from server.generate import encode as encoding
from server.generate import plain_prompts, sampling
from server.generate.sampling import check_token_ids
from server.http import offload as module
from server.http.errors import TooManyRequests
from server.http.offload import LONG_CHARS, SHORT_CHARS, GiveBack, Offload
from tests.server.pooling.embedders import EMBEDDER

MIDDLING = SHORT_CHARS + 1
LONG = LONG_CHARS + 1


@pytest.fixture
def offload():
    made = Offload()
    yield made
    made.close()


@pytest.fixture
def one_thread():
    made = Offload(threads=1, max_waiting=3)
    yield made
    made.close()


@pytest.mark.parametrize(("num_chars", "leaves"), [(0, False), (SHORT_CHARS, False), (SHORT_CHARS + 1, True)])
async def test_work_leaves_the_loop_by_its_size(offload, num_chars, leaves):
    thread = await offload.run(num_chars, threading.current_thread)
    assert (thread is not threading.main_thread()) == leaves


@pytest.mark.parametrize("num_chars", [0, 10**6])
async def test_what_work_raises_arrives(offload, num_chars):
    def fail() -> None:
        raise KeyError("x")

    def fail_later():
        yield
        fail()

    with pytest.raises(KeyError):
        await offload.run(num_chars, fail)
    with pytest.raises(KeyError):
        await offload.run_pieces(num_chars, fail_later())
    assert await offload.run(num_chars, lambda: "and on it goes") == "and on it goes"


class Gate:
    """Work that waits for the test, and says when it began."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()

    def work(self) -> None:
        self.begun.set()
        assert self.opened.wait(60)

    async def closes(self, offload: Offload, num_chars: int = LONG) -> asyncio.Task[None]:
        """A task whose work is in its thread now."""
        task = asyncio.create_task(offload.run(num_chars, self.work))
        await asyncio.to_thread(self.begun.wait, 60)
        return task


def noted(log: list[str], name: str, num_pieces: int):
    for _ in range(num_pieces - 1):
        log.append(name)
        yield
    log.append(name)


async def settled(*tasks) -> None:
    """Until the tasks have come to where they wait."""
    for _ in range(2 * len(tasks)):
        await asyncio.sleep(0)


async def test_callers_take_turns_after_every_piece(one_thread):
    gate, log = Gate(), []
    first = await gate.closes(one_thread)
    works = [
        asyncio.create_task(one_thread.run_pieces(LONG, noted(log, name, pieces), name[0].encode()))
        for name, pieces in (("a1", 3), ("a2", 1), ("b1", 2), ("c1", 1))
    ]
    await settled(*works)
    gate.opened.set()
    await asyncio.gather(first, *works)
    assert log == ["a1", "b1", "c1", "a2", "b1", "a1", "a1"]


async def test_very_long_work_leaves_a_thread_to_what_is_not(offload):
    gate, other = Gate(), Gate()
    long = await gate.closes(offload)
    second = asyncio.create_task(offload.run(LONG, other.work))
    assert await offload.run(MIDDLING, lambda: "between") == "between"
    assert not other.begun.is_set()
    gate.opened.set()
    other.opened.set()
    await asyncio.gather(long, second)


async def test_what_nobody_waits_for_is_never_begun(one_thread):
    gate, log = Gate(), []
    first = await gate.closes(one_thread)
    leaves = [asyncio.create_task(one_thread.run(LONG, lambda: log.append("left"))) for _ in range(3)]
    await settled(*leaves)
    for task in leaves:
        task.cancel()
    await asyncio.gather(*leaves, return_exceptions=True)
    stays = asyncio.create_task(one_thread.run(LONG, lambda: log.append("stayed")))
    gate.opened.set()
    await asyncio.gather(first, stays)
    assert log == ["stayed"]


async def test_work_that_is_left_ends_after_its_piece(one_thread):
    gate, log = Gate(), []

    def work():
        try:
            gate.work()
            yield
            log.append("second piece")
        finally:
            log.append("closed")

    task = asyncio.create_task(one_thread.run_pieces(LONG, work()))
    await asyncio.to_thread(gate.begun.wait, 60)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    gate.opened.set()
    await one_thread.run(LONG, lambda: None)
    assert log == ["closed"]


async def test_what_one_caller_has_waiting_is_bounded_and_another_is_served(one_thread):
    gate = Gate()
    first = await gate.closes(one_thread)
    greedy = [asyncio.create_task(one_thread.run(LONG, lambda: None, b"a")) for _ in range(4)]
    await settled(*greedy)
    with pytest.raises(TooManyRequests):
        await greedy.pop()
    assert not any(task.done() for task in greedy)
    other = asyncio.create_task(one_thread.run(LONG, lambda: "served", b"b"))
    crowd = [asyncio.create_task(one_thread.run(LONG, lambda: None, name.encode())) for name in "cdefghijkl"]
    await settled(*crowd)
    gate.opened.set()
    refused = [error for error in await asyncio.gather(*crowd, return_exceptions=True) if error is not None]
    assert [type(error) for error in refused] == [TooManyRequests] * 2  # four times as many as of one caller
    assert await other == "served"
    await asyncio.gather(first, *greedy)


async def test_memory_is_given_back_once_after_very_long_work_and_not_on_the_loop(monkeypatch):
    monkeypatch.setattr(module, "GIVE_BACK_AFTER_S", 0.0)
    given_back, threads = threading.Event(), []

    def give_back() -> None:
        threads.append(threading.current_thread())
        given_back.set()

    offload = Offload(give_back=GiveBack(give_back))
    await offload.run(MIDDLING, lambda: None)
    await asyncio.sleep(0)
    assert not threads
    await asyncio.gather(*(offload.run(LONG, lambda: None) for _ in range(3)))
    await asyncio.to_thread(given_back.wait, 60)
    assert threads
    assert threading.main_thread() not in threads
    offload.close()


class Large:
    """Stands for what is worked on."""


async def test_what_work_raised_keeps_nothing_of_what_was_worked_on(one_thread):
    """Not even until the next collection of circles, which may be minutes away."""
    large = Large()
    kept = weakref.ref(large)

    def work(large: Large) -> None:
        raise ValueError("too large")

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await one_thread.run(LONG, partial(work, large))
        del large
        await one_thread.run(LONG, lambda: None)  # and the thread is done with it
        assert kept() is None
    finally:
        gc.enable()


# --- in a server ----------------------------------------------------------------------------------------------------


async def test_long_prompts_and_conversations_are_tokenised_in_the_pool(serve, monkeypatch):
    server = await serve("ok", max_model_len=100_000)
    threads = []
    encode = type(server.tokenizer).encode

    def noted(self, text, *args, **more):
        threads.append(threading.current_thread().name.startswith("oneloop-text"))
        return encode(self, text, *args, **more)

    monkeypatch.setattr(type(server.tokenizer), "encode", noted)
    await server.complete(prompt="short")
    await server.complete(prompt="x" * 10_000)
    await server.chat(messages=[{"role": "user", "content": "x" * 10_000}])
    assert threads == [False, True, True]


async def test_ids_of_a_long_prompt_are_checked_in_the_pool_piece_by_piece(serve, monkeypatch):
    server = await serve("ok", max_model_len=100_000)
    checked = []

    def noted(ids, vocab_size, param):
        checked.append((threading.current_thread().name.startswith("oneloop-text"), len(ids)))
        check_token_ids(ids, vocab_size, param)

    monkeypatch.setattr(plain_prompts, "check_token_ids", noted)
    await server.complete(prompt=[5] * 100)
    await server.complete(prompt=[5] * 20_000)
    assert checked == [
        (False, 100),
        (True, plain_prompts.PIECE),
        (True, plain_prompts.PIECE),
        (True, 20_000 - 2 * plain_prompts.PIECE),
    ]
    refused = await server.complete(prompt=[5] * 20_000 + [10**9])
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("token id 1000000000 is outside the vocabulary")


async def on_the_loop(monkeypatch, server, work) -> list[int]:
    """How many characters each call of the tokenizer on the loop's own thread got."""
    lengths = []
    encode = type(server.tokenizer).encode

    def noted(self, text, *args, **more):
        if threading.current_thread() is threading.main_thread():
            lengths.append(len(text))
        return encode(self, text, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(type(server.tokenizer), "encode", noted)
        await work
    return lengths


async def test_many_short_prompts_leave_the_loop_together(serve, monkeypatch):
    server = await serve("ok", max_queue=256)
    assert await on_the_loop(monkeypatch, server, server.complete(prompt=["ab"] * 10)) == [2] * 10
    assert await on_the_loop(monkeypatch, server, server.complete(prompt=["ab"] * 100)) == []


async def test_more_prompts_than_the_queue_holds_are_refused_before_any_is_tokenised(serve, monkeypatch):
    server = await serve(max_queue=8)
    monkeypatch.setattr(type(server.tokenizer), "encode", None)
    refused = await server.complete(prompt=["x" * 1900] * 9)
    assert refused.status_code == 400
    assert "9 prompts" in refused.json()["error"]["message"]
    refused = await server.complete(prompt=["x" * 1900] * 3, n=3)
    assert "are 9 sequences" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": ""}] * 60},
        {"chat_template_kwargs": {"a": [0] * 100}},
        {"chat_template_kwargs": {"a": {str(number): {} for number in range(100)}}},
        {"documents": [{"a": ""}] * 60},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [0] * 100}}}]}]},
    ],
    ids=["messages", "a list of an argument", "objects of an argument", "documents", "calls"],
)  # fmt: skip
async def test_what_is_rendered_costs_by_how_many_it_is_not_by_its_letters_alone(serve, monkeypatch, fields):
    server = await serve(chat=True, max_model_len=10_000)
    messages = [{"role": "user", "content": "Hi"}]
    given = {"messages": messages, **fields}
    given["messages"] = [*messages, *given["messages"]]
    assert await on_the_loop(monkeypatch, server, server.post("/tokenize", given)) == []
    assert len(await on_the_loop(monkeypatch, server, server.post("/tokenize", {"messages": messages}))) == 1


async def test_more_messages_than_the_context_has_tokens_are_refused_unrendered(serve, monkeypatch):
    server = await serve(max_model_len=100)
    monkeypatch.setattr("server.models.prompt.ChatTemplate.render", None)
    refused = await server.chat(messages=[{"role": "user", "content": ""}] * 101)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    refused = await server.chat(chat_template_kwargs={str(number): 1 for number in range(101)})
    assert refused.json()["error"]["param"] == "chat_template_kwargs"


async def test_tokens_as_strings_are_looked_up_off_the_loop(serve, monkeypatch):
    server = await serve()
    threads = []
    strings = type(server.tokenizer).token_strings

    def noted(self, ids):
        threads.append(threading.current_thread() is threading.main_thread())
        return strings(self, ids)

    monkeypatch.setattr(type(server.tokenizer), "token_strings", noted)
    for length in (10, 3000):
        found = await server.post("/tokenize", {"prompt": "a" * length, "return_token_strs": True})
        assert found.json()["token_strs"] == ["a"] * length
    assert threads == [True, False]


@pytest.mark.parametrize("fields", [{}, {"return_token_strs": True}])
async def test_texts_to_be_counted_have_a_bound_and_cost_no_more_than_it(serve, monkeypatch, fields):
    monkeypatch.setattr(encoding, "MAX_TOKENS", 2000)
    monkeypatch.setattr("server.models.tokenizer.PIECE_CHARS", 500)
    server = await serve(max_model_len=100)
    seen = []
    encode = type(server.tokenizer).encode

    def noted(self, text, *args, **more):
        seen.append(len(text))
        return encode(self, text, *args, **more)

    monkeypatch.setattr(type(server.tokenizer), "encode", noted)
    assert (await server.post("/tokenize", {"prompt": "é" * 900, **fields})).json()["count"] == 1800
    seen.clear()
    refused = await server.post("/tokenize", {"prompt": "é" * 8 * 2000, **fields})
    assert refused.status_code == 400
    assert "2000 tokens" in refused.json()["error"]["message"]
    assert sum(seen) <= 2000
    seen.clear()
    refused = await server.post("/tokenize", {"prompt": "é" * (8 * 2000 + 1), **fields})
    assert refused.json()["error"]["param"] == "prompt"
    cut = await server.complete(prompt="é" * (8 * 2000 + 1), truncate_prompt_tokens=5)
    assert cut.status_code == 400
    assert not seen
    many = await server.post("/detokenize", {"tokens": [5] * 2001})
    assert many.json()["error"]["param"] == "tokens"
    assert (await server.post("/detokenize", {"tokens": [5] * 2000})).status_code == 200


async def test_detokenising_in_pieces_loses_no_character_at_their_edges(serve, monkeypatch):
    monkeypatch.setattr("server.api.operations.tokenize.PIECE", 1000)
    server = await serve()
    text = "é€😀a" * 800
    ids = server.tokenizer.encode(text)
    assert (await server.post("/detokenize", {"tokens": ids})).json()["prompt"] == text


async def test_a_client_that_leaves_takes_its_waiting_text_along(serve, monkeypatch):
    server = await serve("ok", max_model_len=100_000)
    offload, gates = server.service.offload, [Gate(), Gate()]
    held = [await gate.closes(offload, MIDDLING) for gate in gates]  # both threads
    monkeypatch.setattr(type(server.tokenizer), "encode", None)
    answer = await server.open_stream("/v1/completions", prompt="x" * 10_000)
    waits = asyncio.Event()
    enqueue = module.Offload._enqueue
    drop = module.Offload._drop
    dropped = asyncio.Event()

    def noted(self, job):
        enqueue(self, job)
        waits.set()

    def noted_too(self, job):
        drop(self, job)
        dropped.set()

    monkeypatch.setattr(module.Offload, "_enqueue", noted)
    monkeypatch.setattr(module.Offload, "_drop", noted_too)
    await waits.wait()
    answer.leave()
    await dropped.wait()
    for gate in gates:
        gate.opened.set()
    await asyncio.gather(*held)
    metrics = (await server.http.get("/metrics")).text
    assert 'route="/v1/completions",status="499"' in metrics


async def test_callers_are_told_apart_by_key_else_by_address(serve, monkeypatch):
    callers = []
    run = module.Offload.run_pieces

    async def noted(self, num_chars, work, caller=None):
        callers.append(caller)
        return await run(self, num_chars, work, caller)

    monkeypatch.setattr(module.Offload, "run_pieces", noted)
    open_to_all, with_keys = await serve(), await serve(api_key=("one", "other"))
    await open_to_all.complete()
    for key in ("one", "other", "one"):
        await with_keys.post("/v1/completions", {"prompt": "Hi"}, headers={"authorization": f"Bearer {key}"})
    assert callers[0] == bytes([127, 0, 0, 1])
    assert callers[1] == callers[3] != callers[2]
    assert callers[1] != callers[0]


async def test_ids_that_alone_may_be_drawn_are_looked_at_once_and_off_the_loop(serve, monkeypatch):
    """Else a request with many prompts holds the loop up for each of them."""
    server = await serve()
    looked_at = []

    def noted(ids, vocab_size, param):
        looked_at.append((param, len(ids), threading.current_thread() is threading.main_thread()))
        check_token_ids(ids, vocab_size, param)

    monkeypatch.setattr(sampling, "check_token_ids", noted)
    monkeypatch.setattr(sampling, "IDS_PER_CHAR", 0.05)
    vocab_size = server.tokenizer.vocab_size
    answer = await server.complete(prompt=["a"] * 20, max_tokens=1, allowed_token_ids=[*range(vocab_size)])
    assert answer.status_code == 200, answer.text
    assert [each for each in looked_at if each[0] == "allowed_token_ids"] == [("allowed_token_ids", vocab_size, False)]
    assert len({id(request.params.allowed_token_ids) for request in server.engine.submitted}) == 1
    refused = await server.complete(allowed_token_ids=[5] * (vocab_size + 1))
    assert refused.json()["error"]["param"] == "allowed_token_ids"


async def test_of_thousands_of_texts_to_pool_one_span_is_begun_at_a_time_and_the_answer_is_written_off_the_loop(
    serve, monkeypatch
):
    server = await serve(pooler=EMBEDDER)
    measured, begun, written = [], [], []
    cost_of, one_span, filled = run.cost_of, run._Run._run, pooled.filled

    def noted_answer(body, items):
        written.append(threading.current_thread() is threading.main_thread())
        yield from filled(body, items)

    async def noted_span(self, span):
        begun.append(len(measured))
        await one_span(self, span)

    monkeypatch.setattr(run, "cost_of", lambda given: measured.append(given) or cost_of(given))
    monkeypatch.setattr(run._Run, "_run", noted_span)
    monkeypatch.setattr(pooled, "filled", noted_answer)
    assert (await server.post("/score", {"text_1": "a", "text_2": ["b"] * 999})).status_code == 200
    assert len(measured) == 1000
    assert begun[0] <= run.SPAN_INPUTS + 1
    assert written == [False]
