"""What clients of other servers send: taken where its meaning is clear, refused in words where it is not, never answered with less
than it asks for and a 200."""

from __future__ import annotations

import huggingface_hub
import pytest

from tests.server.structured.reading import reads
from tests.server.test_forced_calls import BAD_CALL, CALL, F
from tests.server.test_refusals import error_of
from tests.server.test_tool_calls import ROOM

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LARK = 'start: "x" | "y"\n'
USER = {"role": "user", "content": "Hi"}


async def post(server, route: str, **fields):
    bodies = {
        "chat": ("/v1/chat/completions", {"messages": [USER]}),
        "completions": ("/v1/completions", {"prompt": "Hi"}),
        "responses": ("/v1/responses", {"input": "Hi"}),
        "messages": ("/v1/messages", {"model": "tiny", "messages": [USER], "max_tokens": 50}),
    }
    path, body = bodies[route]
    return await server.post(path, {**body, **fields})


every_route = pytest.mark.parametrize("route", ["chat", "completions", "responses", "messages"])


def holds(server, taken: str, refused: str) -> None:
    (make,) = server.engine.submitted[-1].params.matchers
    assert reads(make(), server.tokenizer.encode(taken))
    assert not reads(make(), server.tokenizer.encode(refused))


# --- constraints, in whatever words -------------------------------------------------------------------------------


@every_route
@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        ({"regex": "[0-9]+"}, "12", "a"),
        ({"ebnf": 'root ::= "x" | "y"'}, "x", "z"),
        ({"grammar": 'root ::= "x" | "y"'}, "x", "z"),
        ({"json_schema": SCHEMA}, '{"a":1}', "{}"),
        ({"json_schema": '{"type": "integer"}'}, "1", "x"),
        ({"format": SCHEMA}, '{"a":1}', "{}"),
        ({"format": "json"}, "{}", "1"),
        ({"guided_json": SCHEMA}, '{"a":1}', "{}"),
        ({"guided_regex": "a+"}, "aa", "b"),
        ({"guided_choice": ["yes"]}, "yes", "no"),
        ({"guided_grammar": LARK}, "x", "z"),
        ({"structured_outputs": {"regex": "a+"}}, "aa", "b"),
    ],
    ids=str,
)
async def test_a_constraint_in_another_servers_field_constrains(serve, route, fields, taken, refused):
    server = await serve()
    answer = await post(server, route, **fields)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    holds(server, taken, refused)


@every_route
@pytest.mark.parametrize(
    "fields",
    [
        {"regex": 5},
        {"grammar": {"type": "json", "value": {}}},
        {"format": "yaml"},
        {"guided_choice": []},
        {"json_schema": "{"},
    ],
    ids=str,
)
async def test_one_that_cannot_be_read_is_refused_by_its_name(serve, route, fields):
    server = await serve()
    answer = await post(server, route, **fields)
    assert answer.status_code == 400
    assert next(iter(fields)) in answer.text
    assert not server.engine.submitted


@every_route
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_grammar": LARK, "structured_outputs": {"grammar": LARK}},  # guidance 0.3, to vLLM old and new
        {
            "guided_json": SCHEMA,
            "json_schema": '{"required":["a"],"type":"object","properties":{"a":{"type":"integer"}}}',
        },
        {"regex": "x", "guided_regex": "x", "structured_outputs": {"regex": "x"}},
    ],
    ids=str,
)
async def test_the_same_said_twice_is_one_constraint(serve, route, fields):
    server = await serve()
    answer = await post(server, route, **fields)
    assert answer.status_code == 200, answer.text
    assert len(server.engine.submitted[-1].params.matchers) == 1


@every_route
async def test_two_constraints_are_refused_with_both_names(serve, route):
    server = await serve()
    answer = await post(server, route, guided_regex="a", structured_outputs={"regex": "b"})
    assert answer.status_code == 400
    assert "structured_outputs and guided_regex: more than one output format" in answer.text


@pytest.mark.parametrize(
    "style", [{"structured_outputs": {"disable_any_whitespace": False}}, {"guided_whitespace_pattern": "[ ]{3}"}]
)
async def test_how_json_is_written_can_be_said_beside_a_format(serve, style):
    server = await serve()
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert (await server.chat(response_format=named, **style)).status_code == 200
    holds(server, '{"a":   1}', "{}")
    error = error_of(await server.chat(**style), 400)
    assert "no field requests JSON" in error["message"]


async def test_a_json_object_may_have_a_schema_as_llama_cpp_has_it(serve):
    server = await serve()
    assert (await server.chat(response_format={"type": "json_object", "schema": SCHEMA})).status_code == 200
    holds(server, '{"a":1}', "{}")


# --- calls and formats --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_format_beside_a_forced_call_is_a_format_for_text(serve, choice):
    server = await serve(CALL, max_model_len=ROOM)
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    answer = await server.chat(tools=[F], tool_choice=choice, response_format=named)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["tool_calls"]
    (make,) = server.engine.submitted[-1].params.matchers
    encode = server.tokenizer.encode
    assert reads(make(), encode(CALL, add_special_tokens=False))
    assert not reads(make(), encode(BAD_CALL, add_special_tokens=False))
    assert not reads(make(), encode("1"))


async def test_the_same_of_responses_as_instructor_sends_it(serve):
    server = await serve(CALL, max_model_len=ROOM)
    tool = {"type": "function", "name": "f", "parameters": F["function"]["parameters"]}
    format = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    answer = await server.respond(tools=[tool], tool_choice={"type": "function", "name": "f"}, text={"format": format})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["type"] == "function_call"


# --- lengths, stops, hints ----------------------------------------------------------------------------------------


async def test_n_predict_is_max_tokens(serve):
    server = await serve()
    for answer in (await server.chat(n_predict=3), await server.complete(n_predict=3)):
        assert answer.json()["usage"]["completion_tokens"] == 3
    assert (await server.complete(n_predict=-1)).json()["choices"][0]["text"] == "Hello there"
    assert error_of(await server.chat(n_predict=3, max_tokens=4), 400)["param"] == "n_predict"


@pytest.mark.parametrize("name", ["max_new_tokens", "num_predict", "max_output_tokens"])
async def test_other_names_of_it_are_refused_with_the_right_one(serve, name):
    server = await serve()
    assert "use max_tokens instead" in error_of(await server.chat(**{name: 5}), 400)["message"]


async def test_stop_ends_a_message_too(serve):
    server = await serve("Hello there")
    for stop in ("there", ["there"]):
        answer = (await post(server, "messages", stop=stop)).json()
        assert (answer["content"][0]["text"], answer["stop_sequence"]) == ("Hello ", "there")
    assert (await post(server, "messages", stop="a", stop_sequences=["b"])).status_code == 400


async def test_hints_of_chats_never_cost_the_answer(serve):
    server = await serve()
    answer = await server.chat(verbosity="low", web_search_options={}, session_id="x")
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "session_id, verbosity, web_search_options"


async def test_parts_of_other_apis_are_text_in_a_chat(serve):
    server = await serve()
    parts = [
        {"type": "input_text", "text": "One"},
        {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}},
    ]
    assistant = {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Three"}, {"type": "refusal", "refusal": "No"}],
    }
    answer = await server.chat(messages=[{"role": "user", "content": parts}, assistant, USER])
    assert answer.status_code == 200, answer.text
    prompt = server.tokenizer.decode(server.engine.submitted[-1].prompt_ids)
    assert all(word in prompt for word in ("One", "two", "Three", "No"))


@pytest.mark.parametrize(("part", "place"), [
    ({"type": "image_url", "image_url": {"url": "data:,"}}, "image_url.url"),
    ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio.data"),
    ({"type": "file", "file": {"file_data": "data:image/png;base64,"}}, "file.file_data"),
])  # fmt: skip
async def test_what_is_no_text_is_refused_as_that_and_not_as_something_to_leave_out(serve, part, place):
    server = await serve()
    error = error_of(await server.chat(messages=[{"role": "user", "content": [part]}]), 400)
    assert error["param"] == f"messages[0].content[0].{place}"
    assert "the model accepts text only" in error["message"]
    assert "leave it out" not in error["message"]


# --- threads of Anthropic's client --------------------------------------------------------------------------------


async def test_the_tool_runner_of_anthropics_client_gets_its_answer(serve):
    import anthropic

    calls = []
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    server = await serve(max_model_len=ROOM)
    texts = iter([call, call, "Sunny."])
    server.engine.script = lambda request: [*server.tokenizer.encode(next(texts)), 2]

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather of a city."""
        calls.append(city)
        return "sun"

    runner = server.anthropic().beta.messages.tool_runner(
        model="tiny", max_tokens=100, tools=[weather], messages=[{"role": "user", "content": "Go"}]
    )
    last = await runner.until_done()
    assert calls == ["Paris", "Paris"]
    assert last.content[0].text == "Sunny."


async def test_a_thread_is_begun_and_never_continued(serve):
    server = await serve()
    begun = await post(server, "messages", thread={"type": "create"})
    assert begun.headers["x-ignored-fields"] == "thread"
    answer = await post(server, "messages", thread={"type": "continue", "previous_message_id": begun.json()["id"]})
    assert answer.status_code == 404
    assert answer.json()["error"]["details"] == {"error_code": "thread_not_found"}


async def test_an_answer_comes_back_with_litellms_notes_on_it(serve):
    server = await serve("Hi")
    answer = {"role": "assistant", "content": "a", "provider_specific_fields": {"refusal": None}}
    response = await server.chat(
        messages=[{"role": "user", "content": "Hi"}, answer, {"role": "user", "content": "Hi"}]
    )
    assert response.status_code == 200


# --- Hugging Face -------------------------------------------------------------------------------------------------


async def test_a_schema_of_hugging_faces_client_constrains(serve):
    server = await serve()
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    async with huggingface_hub.AsyncInferenceClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        await client.chat_completion([USER], model="tiny", response_format=asked)
    holds(server, '{"a":1}', "{}")
