"""Fields of the core in the words of each API: paths are translated, and nothing else of a message."""

from __future__ import annotations

import pytest

from server.http.errors import Field, FieldNames, InvalidRequest
from tests.server.test_refusals import error_of

NAMES = FieldNames({"messages": "input", "response_format": "text.format", "response_format.json_schema": "text"})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("messages", "input"),
        ("messages[3].content", "input[3].content"),
        ("response_format.json_schema.schema", "text.schema"),
        ("response_format.type", "text.format.type"),
        ("messages_of_others", "messages_of_others"),
        ("tools", "tools"),
    ],
)
def test_a_path_moves_with_what_lies_above_it(ours, theirs):
    assert NAMES.name_of(ours) == theirs


def test_only_fields_of_a_message_are_translated():
    with pytest.raises(InvalidRequest) as caught, NAMES.spoken():
        raise InvalidRequest(Field("messages"), " has messages", param=Field("messages[0]"))
    assert (caught.value.message, caught.value.param) == ("input has messages", "input[0]")
    assert b"input has messages" in caught.value.body()


def test_a_param_in_the_clients_own_words_stays():
    with pytest.raises(InvalidRequest) as caught, NAMES.spoken():
        raise InvalidRequest("no", param="messages")
    assert caught.value.param == "messages"


TOOL = {"type": "function", "name": "messages"}


async def test_a_tool_called_messages_keeps_its_name(serve):
    server = await serve(tool_parser="hermes")
    error = error_of(await server.respond(tools=[TOOL, TOOL]), 400)
    assert "'messages'" in error["message"]
    assert error["param"] == "tools"


async def test_what_a_chat_template_says_is_not_translated(serve):
    server = await serve()
    refused = [{"role": "assistant", "content": "x"}]
    error = error_of(await server.respond(input=refused), 400)
    assert error["message"] == "roles must alternate"
    assert error["param"] == "input"
    broken = error_of(await server.respond(chat_template_kwargs={"messages": []}), 400)
    assert broken["message"] == "chat_template_kwargs may not set messages"
    assert broken["param"] == "chat_template_kwargs.messages"


async def test_each_api_names_the_effort_by_its_own_field(serve):
    server = await serve(tool_parser="harmony")
    words = {"reasoning_effort": "none"}
    chat = error_of(await server.chat(**words), 400)
    response = error_of(await server.respond(reasoning={"effort": "none"}), 400)
    assert (chat["param"], response["param"]) == ("reasoning_effort", "reasoning.effort")
    assert chat["message"].startswith("reasoning_effort 'none' is not supported")
    assert response["message"].startswith("reasoning.effort 'none' is not supported")
    message = {"max_tokens": 20, "model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    ignored = await server.post("/v1/messages", {**message, "output_config": {"effort": "max"}})
    assert ignored.headers["x-ignored-fields"] == "output_config.effort"
