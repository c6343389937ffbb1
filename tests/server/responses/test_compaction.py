"""/v1/responses/input_tokens and /compact, reasoning that clients keep unread, and paths there are not."""

from __future__ import annotations

import pytest

from server.api.responses.input_items import seal, unseal
from tests.server.responses.reading import both, prompt_of
from tests.server.test_reasoning_chats import SAYS, thinker
from tests.server.test_refusals import error_of

TIME = {"type": "function", "name": "time"}
TALK = [
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada"},
    {"role": "user", "content": [{"type": "input_text", "text": "What is it?"}]},
]


@pytest.mark.parametrize(
    "fields", [{}, {"instructions": "Be brief"}, {"input": TALK}, {"tools": [{"type": "function", "name": "time"}]}]
)
async def test_input_tokens_are_those_that_a_response_is_charged(serve, fields):
    server = await serve(max_model_len=4096)
    counted = await server.post("/v1/responses/input_tokens", {"input": "Hi", **fields})
    assert counted.status_code == 200, counted.text
    used = (await server.respond(**fields)).json()["usage"]["input_tokens"]
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": used}


async def test_the_official_client_counts_and_compacts(serve):
    server = await serve("The user is Ada.", max_model_len=4096)
    client = server.openai()
    first = await client.responses.create(model="tiny", input=TALK)
    counted = await client.responses.input_tokens.count(model="tiny", previous_response_id=first.id)
    assert counted.input_tokens > first.usage.input_tokens
    compacted = await client.responses.compact(model="tiny", input=TALK, previous_response_id=first.id)
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message"] * 4 + ["compaction"]
    assert compacted.usage.output_tokens > 0
    asked = server.tokenizer.decode(server.engine.submitted[-1].prompt_ids)
    assert "Hello Ada" in asked
    assert "Summarise this conversation" in asked


async def test_a_compacted_conversation_goes_on_from_its_summary(serve):
    server = await serve("The user is Ada.", max_model_len=4096)
    output = (await server.post("/v1/responses/compact", {"input": TALK})).json()["output"]
    prompt = await prompt_of(server, input=[*output, {"role": "user", "content": "Go on"}])
    assert "A summary of the conversation up to here:\n\nThe user is Ada." in prompt
    assert "My name is Ada." in prompt
    assert "Hello Ada" not in prompt


async def test_a_conversation_that_leaves_no_room_for_a_summary_is_refused(serve):
    server = await serve(max_model_len=512)
    long = {"input": "x" * 180, "instructions": "y" * 40}
    assert (await server.post("/v1/responses/input_tokens", long)).status_code == 200
    error = error_of(await server.post("/v1/responses/compact", long), 400)
    assert error["code"] == "context_length_exceeded"
    assert not server.engine.submitted


async def test_reasoning_comes_back_sealed_to_clients_that_send_nothing_else_back(serve):
    server = await serve(SAYS, speaks=thinker())
    body = await both(server, include=["reasoning.encrypted_content"], store=False)
    sealed = body["output"][0]["encrypted_content"]
    assert unseal(sealed) == "Hm."
    assert "encrypted_content" not in (await server.respond()).json()["output"][0]
    kept = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    answer = await server.respond(input=[{"role": "user", "content": "Hi"}, kept, TALK[1], TALK[2]])
    assert answer.status_code == 200
    assert "x-ignored-fields" not in answer.headers


async def test_what_another_server_sealed_is_named_as_ignored(serve):
    server = await serve()
    item = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"}
    answer = await server.respond(
        input=[TALK[0], item, {"role": "user", "content": "Hi", "phase": "commentary", "mood": "good"}]
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == "input.encrypted_content, input.mood, input.phase"


@pytest.mark.parametrize("text", ["", "a", "ä😀\n"])
def test_what_is_sealed_can_be_unsealed(text):
    assert unseal(seal(text)) == text
    assert unseal(text) is None


def test_what_is_no_unicode_is_replaced_when_it_is_sealed():
    assert unseal(seal("a\ud800b")) == "a?b"


async def test_hints_never_cost_the_answer(serve):
    server = await serve()
    answer = await server.respond(
        text={"verbosity": "low"}, reasoning={"context": "all_turns", "mode": "fast"}, session_id="x"
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == "session_id, reasoning.context, reasoning.mode, text.verbosity"


@pytest.mark.parametrize("path", ["/v1/responses/nothing", "/v1/responses/resp_1/nothing", "/v1/models/nothing"])
async def test_a_path_there_is_not_is_404(serve, path):
    server = await serve()
    assert error_of(await server.post(path, {"input": "Hi"}), 404)["code"] == "unknown_url"
