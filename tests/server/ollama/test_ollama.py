"""/api/chat and /api/generate: what Ollama's own client makes of them, their lines, their options and their errors."""

from __future__ import annotations

import asyncio
import json

import ollama
import pytest

from server.generate.timings import Timings
from tests.server.conftest import MESSAGES
from tests.server.text.tool_samples import TOOLS
from tests.server.tiny import tiny_tokenizer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is not false %}<think>{% else %}<think></think>{% endif %}"
)


async def lines(server, path: str, **fields) -> list[dict]:
    response = await server.post(path, {"model": "tiny", **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def prompt_of(server) -> str:
    return server.tokenizer.decode(server.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


# --- Ollama's client ----------------------------------------------------------------------------------------------


async def test_ollamas_client_chats_whole_and_streamed(serve):
    server = await serve()
    whole = await server.ollama().chat("tiny", MESSAGES)
    assert (whole.message.role, whole.message.content) == ("assistant", "Hello there")
    assert (whole.done, whole.done_reason, whole.model) == (True, "stop", "tiny")
    assert whole.prompt_eval_count == len(server.engine.submitted[0].prompt_ids)
    assert whole.eval_count == len("Hello there") + 1
    parts = [part async for part in await server.ollama().chat("tiny:latest", MESSAGES, stream=True)]
    assert "".join(part.message.content for part in parts) == "Hello there"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    assert {part.model for part in parts} == {"tiny:latest"}


async def test_ollamas_client_generates_whole_and_streamed(serve):
    server = await serve()
    whole = await server.ollama().generate("tiny", "Hi", system="Be brief")
    assert (whole.response, whole.done_reason) == ("Hello there", "stop")
    assert prompt_of(server) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    parts = [part async for part in await server.ollama().generate("tiny", "Hi", stream=True)]
    assert "".join(part.response for part in parts) == "Hello there"


async def test_ollamas_client_calls_tools(serve):
    server = await serve(f"Let me see. {CALL}{CALL}", max_model_len=8192, tool_parser="hermes")
    whole = await server.ollama().chat("tiny", MESSAGES, tools=TOOLS)
    assert whole.message.content == "Let me see."
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert calls == [("get_weather", {"city": "Paris"})] * 2
    parts = [part async for part in await server.ollama().chat("tiny", MESSAGES, tools=TOOLS, stream=True)]
    streamed = [call for part in parts for call in part.message.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in streamed] == calls
    assert [part.done_reason for part in parts if part.done] == ["stop"]


async def test_ollamas_client_sends_results_back(serve):
    server = await serve(max_model_len=8192, tool_parser="hermes")
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_name": "get_weather", "content": "rain"},
        {"role": "tool", "content": "sun"},
    ]
    assert (await server.ollama().chat("tiny", history, tools=TOOLS)).done
    assert prompt_of(server).index("rain") < prompt_of(server).index("sun")
    orphan = await server.post(
        "/api/chat", {"model": "tiny", "messages": [*MESSAGES, {"role": "tool", "content": "x"}]}
    )
    assert orphan.status_code == 400
    assert orphan.json()["error"].startswith("messages[1] is a tool result")


async def test_ollamas_client_holds_answers_to_a_schema(serve):
    server = await serve('{"city": "Paris"}')
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    for format in (schema, "json"):
        whole = await server.ollama().chat("tiny", MESSAGES, format=format)
        assert json.loads(whole.message.content) == {"city": "Paris"}
        assert server.engine.submitted[-1].params.matchers
    assert (await server.ollama().generate("tiny", "Hi", format="")).done
    assert not server.engine.submitted[-1].params.matchers


async def test_ollamas_client_reads_log_probabilities(serve):
    server = await serve("ab")
    whole = await server.ollama().chat("tiny", MESSAGES, logprobs=True, top_logprobs=2)
    assert [(entry.token, len(entry.top_logprobs)) for entry in whole.logprobs] == [("a", 2), ("b", 2)]
    parts = [part async for part in await server.ollama().generate("tiny", "x", stream=True, logprobs=True)]
    assert [entry.token for part in parts for entry in part.logprobs or []] == ["a", "b"]


async def test_ollamas_client_sees_what_the_model_thinks(serve):
    server = await serve("Hm.</think>Yes", speaks=tiny_tokenizer(chat_template=THINKS), reasoning_parser="qwen3")
    whole = await server.ollama().chat("tiny", MESSAGES, think=True)
    assert (whole.message.thinking, whole.message.content) == ("Hm.", "Yes")
    parts = [part async for part in await server.ollama().generate("tiny", "Hi", think="high", stream=True)]
    assert "".join(part.thinking or "" for part in parts) == "Hm."
    assert "".join(part.response for part in parts) == "Yes"


async def test_thinking_is_switched_off_by_the_template(serve):
    server = await serve("Yes", speaks=tiny_tokenizer(chat_template=THINKS), reasoning_parser="qwen3")
    whole = await server.ollama().chat("tiny", MESSAGES, think=False)
    assert (whole.message.thinking, whole.message.content) == (None, "Yes")
    assert prompt_of(server) == "Hi<think></think>"


async def test_a_model_that_does_not_think_says_so(serve):
    server = await serve()
    response = await server.post("/api/chat", {"model": "tiny", "messages": MESSAGES, "think": True, "stream": False})
    assert response.json()["message"]["content"] == "Hello there"
    assert response.headers["x-ignored-fields"] == "think"


async def test_ollamas_client_gets_errors_as_its_own(serve):
    server = await serve()
    for call, status in (
        (server.ollama().chat("other", MESSAGES), 404),
        (server.ollama().generate("tiny", "Hi", template="{{ .Prompt }}"), 400),
        (server.ollama().chat("tiny", [{"role": "user", "content": "Hi", "images": [b"abc"]}]), 400),
        (server.ollama().embed("tiny", "Hi"), 400),
        (server.ollama().pull("llama3"), 400),
        (server.ollama().push("tiny"), 400),
        (server.ollama().create("mine", from_="tiny"), 400),
        (server.ollama().copy("tiny", "mine"), 400),
        (server.ollama().delete("tiny"), 400),
    ):
        with pytest.raises(ollama.ResponseError) as raised:
            await call
        assert raised.value.status_code == status
        assert raised.value.error


async def test_ollamas_client_raises_where_a_stream_breaks(serve):
    server = await serve(paused=True)
    stream = await server.ollama().chat("tiny", MESSAGES, stream=True)

    async def read() -> None:
        async for _ in stream:
            server.engine.fail("out of memory")

    reading = asyncio.create_task(read())
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step()
    with pytest.raises(ollama.ResponseError, match="The server had an error"):
        await reading


# --- lines --------------------------------------------------------------------------------------------------------


async def test_lines_are_streamed_unless_the_client_says_no(serve):
    server = await serve("ab")
    got = await lines(server, "/api/chat", messages=MESSAGES)
    assert [line["message"] for line in got] == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": ""},
    ]
    assert [line["done"] for line in got] == [False, False, True]
    got = await lines(server, "/api/generate", prompt="Hi", stream=None)
    assert [line["response"] for line in got] == ["a", "b", ""]


async def test_durations_are_parts_of_the_whole(serve):
    server = await serve()
    last = (await lines(server, "/api/chat", messages=MESSAGES))[-1]
    parts = [last[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
    assert all(part >= 1 for part in parts)
    assert abs(last["total_duration"] - sum(parts)) <= 3  # each was rounded


def test_timings_are_read_off_a_clock():
    now = iter([2.0, 3.5, 4.0, 6.0])
    timings = Timings(1.0, clock=lambda: next(now))
    assert timings.total_s == 0
    timings.begin()
    for _ in range(3):
        timings.note()
    assert (timings.preparing_s, timings.prompt_s, timings.answer_s, timings.total_s) == (1.0, 1.5, 2.5, 5.0)


async def test_a_call_that_breaks_off_is_text_and_not_half_a_call(serve):
    server = await serve(CALL[:-20], max_model_len=8192, tool_parser="hermes")
    got = await lines(server, "/api/chat", messages=MESSAGES, tools=TOOLS)
    assert not any("tool_calls" in line["message"] for line in got)
    assert "".join(line["message"]["content"] for line in got) == CALL[:-20]


async def test_an_answer_that_was_cut_says_so(serve):
    server = await serve()
    assert (await lines(server, "/api/generate", prompt="Hi", options={"num_predict": 2}))[-1][
        "done_reason"
    ] == "length"


async def test_a_client_who_leaves_frees_the_engine(serve):
    server = await serve(paused=True)
    answer = await server.open_stream("/api/chat", model="tiny", messages=MESSAGES)
    await server.engine.until(lambda: bool(server.engine.live))
    answer.leave()
    await server.engine.until(lambda: not server.engine.live)


async def test_nothing_to_answer_loads_the_model_that_is_there(serve):
    server = await serve()
    for path, fields in (
        ("/api/chat", {"messages": []}),
        ("/api/chat", {}),
        ("/api/generate", {}),
        ("/api/generate", {"prompt": ""}),
    ):
        body = (await server.post(path, {"model": "tiny", "keep_alive": "5m", **fields})).json()
        assert (body["done"], body["done_reason"]) == (True, "load")
    assert not server.engine.submitted
    for keep_alive in (0, "0", "0s"):
        response = await server.post("/api/generate", {"model": "tiny", "keep_alive": keep_alive})
        assert (response.status_code, "unloaded" in response.json()["error"]) == (400, True)


# --- fields -------------------------------------------------------------------------------------------------------


async def test_options_reach_the_engine(serve):
    server = await serve()
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.1, "seed": 9, "repeat_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "stop": ["lo"],
    }  # fmt: skip
    response = await server.post(
        "/api/generate", {"model": "tiny", "prompt": "Hi", "options": options, "stream": False}
    )
    assert response.json()["response"] == "Hel"
    assert "x-ignored-fields" not in response.headers
    params = server.engine.submitted[0].params
    seen = (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
    assert seen == (7, 0.5, 3, 0.8, 0.1, 9)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.3, 0.4)


@pytest.mark.parametrize("num_predict", [-1, -2, 0, 10**9, None])
async def test_an_answer_takes_what_the_context_holds(serve, num_predict):
    server = await serve(max_model_len=100)
    assert (await lines(server, "/api/generate", prompt="Hi", raw=True, options={"num_predict": num_predict}))[-1][
        "done"
    ]
    assert server.engine.submitted[0].params.max_tokens == 98


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({"num_ctx": 256, "typical_p": 1.0, "tfs_z": 1, "mirostat": 0, "numa": False}, None),
        ({"num_ctx": 10**6}, "options.num_ctx"),
        ({"typical_p": 0.5}, "options.typical_p"),
        ({"mirostat": 2}, "options.mirostat"),
        ({"num_gpu": 1}, "options.num_gpu"),
        ({"nobody_knows": 1}, "options.nobody_knows"),
        ({"repeat_last_n": 64}, None),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "options.repeat_last_n"),
        ({"repeat_last_n": -1, "repeat_penalty": 1.1}, None),
    ],
)
async def test_options_that_do_nothing_are_named(serve, options, ignored):
    server = await serve()
    response = await server.post("/api/chat", {"model": "tiny", "messages": MESSAGES, "options": options})
    assert response.status_code == 200, response.text
    assert response.headers.get("x-ignored-fields") == ignored
    strict = await serve(strict_fields=True)
    response = await strict.post("/api/chat", {"model": "tiny", "messages": MESSAGES, "options": options})
    assert response.status_code == (200 if ignored is None else 400)


async def test_no_penalty_over_no_tokens(serve):
    server = await serve()
    await lines(server, "/api/generate", prompt="Hi", options={"repeat_last_n": 0, "repeat_penalty": 1.5})
    assert server.engine.submitted[0].params.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"messages": MESSAGES, "options": {"grammar": "root ::= x"}}, "options.grammar"),
        ("/api/chat", {"messages": MESSAGES, "options": {"temperature": 9}}, "options.temperature"),
        ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": "x"}}, "options.num_predict"),
        ("/api/chat", {"messages": MESSAGES, "format": "xml"}, "format"),
        ("/api/chat", {"messages": MESSAGES, "format": {"type": "nonsense"}}, "format"),
        ("/api/chat", {"messages": MESSAGES, "template": "x"}, "template"),
        ("/api/chat", {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
        ("/api/chat", {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("/api/generate", {"prompt": "x", "context": [1, 2]}, "context"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"prompt": "x" * 5000}, "prompt"),
        ("/api/generate", {"prompt": 5}, "prompt"),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_refused_by_name(serve, path, fields, named):
    server = await serve()
    response = await server.post(path, {"model": "tiny", **fields})
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert named in response.json()["error"]
    assert not server.engine.submitted


async def test_bodies_that_are_no_json_and_paths_that_are_none_get_ollamas_errors(serve):
    server = await serve()
    for response, status in (
        (await server.http.post("/api/chat", content=b"{", headers={"content-type": "application/json"}), 400),
        (await server.http.post("/api/chat", content=b"[]"), 400),
        (await server.post("/api/chat", {"messages": MESSAGES}), 400),
        (await server.http.get("/api/chat"), 405),
        (await server.http.get("/api/nothing"), 404),
    ):
        assert response.status_code == status, response.text
        assert list(response.json()) == ["error"]


async def test_curl_may_call_json_a_form_and_a_browser_may_not(serve):
    server = await serve()
    body = json.dumps({"model": "tiny", "messages": MESSAGES}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (await server.http.post("/api/chat", content=body, headers=form)).status_code == 200
    page = {**form, "origin": "https://example.com"}
    assert (await server.http.post("/api/chat", content=body, headers=page)).status_code == 415
    assert (await server.http.post("/v1/chat/completions", content=body, headers=form)).status_code == 415


async def test_raw_prompts_pass_no_template(serve):
    server = await serve()
    await lines(server, "/api/generate", prompt="<|im_start|>x", raw=True)
    assert prompt_of(server) == "<|im_start|>x"
    response = await server.post("/api/generate", {"model": "tiny", "prompt": "x", "raw": True, "system": "y"})
    assert response.headers["x-ignored-fields"] == "system"


async def test_a_model_without_a_template_continues_prompts(serve):
    server = await serve(chat=False)
    await lines(server, "/api/generate", prompt="Once")
    assert prompt_of(server) == "Once"
    assert (await server.post("/api/chat", {"model": "tiny", "messages": MESSAGES})).status_code == 400


async def test_a_suffix_is_filled_up_to(serve):
    speaks = tiny_tokenizer("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    server = await serve("b", speaks=speaks)
    whole = await server.ollama().generate("tiny", "a", suffix="c")
    assert whole.response == "b"
    assert prompt_of(server) == "<|fim_prefix|>a<|fim_suffix|>c<|fim_middle|>"


async def test_an_assistants_last_message_goes_on(serve):
    server = await serve()
    history = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    await lines(server, "/api/chat", messages=history)
    assert prompt_of(server).endswith("<|im_start|>assistant\nWell, ")


async def test_a_key_is_needed_and_ollamas_header_shows_it(serve):
    server = await serve(api_key=("sk",))
    for path in ("/api/tags", "/api/version", "/api/ps"):
        response = await server.http.get(path)
        assert response.status_code == 401
        assert list(response.json()) == ["error"]
    with_key = server.ollama(headers={"Authorization": "Bearer sk"})
    assert (await with_key.chat("tiny", MESSAGES)).done
