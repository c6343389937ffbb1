"""How tests read what /v1/responses says: through the types of the official client, and against the rules of its streams."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from openai.types import responses as official
from pydantic import TypeAdapter

from server.api.responses import api_types as documented
from tests.server.conftest import Running

Json = dict[str, Any]
EVENT: TypeAdapter[Any] = TypeAdapter(official.ResponseStreamEvent)
FINAL = {
    "completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed",
    "cancelled": "response.incomplete",
}  # fmt: skip
# Of one item, in their order; a delta may come any number of times.
PART = ("output_item.added", "content_part.added", "{0}.delta", "{0}.done", "content_part.done", "output_item.done")
MESSAGE, REASONING = ([kind.format(text) for kind in PART] for text in ("output_text", "reasoning_text"))
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
CUSTOM = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]
ORDER = {"message": MESSAGE, "reasoning": REASONING, "function_call": CALL, "custom_tool_call": CUSTOM}


def checked(body: Json) -> Json:
    """A response, which is what the client and our document say it is."""
    official.Response.model_validate(body, strict=False)
    assert msgspec.to_builtins(msgspec.convert(body, documented.Response)) == body
    assert body["output"] == [] or len({item["id"] for item in body["output"]}) == len(body["output"])
    return body


def frames(text: str) -> list[Json]:
    """The events of a stream's body."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def final(events: list[Json], *, first: int = 0) -> Json:
    """The response that a stream ends with, checked against all that came before. `first`: the number the stream begins at."""
    for number, event in enumerate(events, start=first):
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        assert msgspec.to_builtins(msgspec.convert(event, documented.ResponseEvent)) == event
    response = checked(events[-1]["response"])
    assert events[-1]["type"] == FINAL[response["status"]]
    if first:
        return response
    assert events[0]["type"] == "response.created"
    assert events[0]["response"]["output"] == []
    of_items = [event for event in events if "output_index" in event]
    assert [event["output_index"] for event in of_items] == sorted(event["output_index"] for event in of_items)
    assert {event["output_index"] for event in of_items} == set(range(len(response["output"])))
    for index, item in enumerate(response["output"]):
        _check_item([event for event in of_items if event["output_index"] == index], item)
    return response


def _check_item(events: list[Json], item: Json) -> None:
    order = ORDER[item["type"]]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind in order if kind in kinds or not kind.endswith("delta")] == list(dict.fromkeys(kinds))
    assert all(kinds.count(kind) == 1 for kind in kinds if not kind.endswith("delta"))
    begun = {key: value for key, value in item.items() if key != "encrypted_content"}
    assert events[0]["item"] == {**begun, "status": "in_progress", **_empty(item)}
    assert events[-1]["item"] == item
    assert {event["item_id"] for event in events[1:-1]} == {item["id"]}
    text = "".join(event["delta"] for event in events if "delta" in event)
    if item["type"] in ("function_call", "custom_tool_call"):
        passed = "arguments" if item["type"] == "function_call" else "input"
        assert text == events[-2][passed] == item[passed]
        return
    part = item["content"][0]
    assert text == events[-3]["text"] == part["text"]
    assert events[-2]["part"] == part
    assert events[1]["part"] == {**part, "text": "", **({"logprobs": []} if "logprobs" in part else {})}
    if "logprobs" in part:
        deltas = [event for event in events if "delta" in event]
        assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]


def _empty(item: Json) -> Json:
    return {"function_call": {"arguments": ""}, "custom_tool_call": {"input": ""}}.get(item["type"], {"content": []})


def without_ids(value: Any) -> Any:
    """`value` without what differs from one making of the same response to the next."""
    if isinstance(value, list):
        return list(map(without_ids, value))
    if isinstance(value, dict):
        left_out = {"id", "call_id", "created_at", "completed_at"}
        return {key: without_ids(inner) for key, inner in value.items() if key not in left_out}
    return value


async def both(server: Running, **fields: Any) -> Json:
    """The response whole, which has to be what it is when it is streamed."""
    whole = await server.respond(**fields)
    assert whole.status_code == 200, whole.text
    streamed = await server.respond(stream=True, **fields)
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert without_ids(final(frames(streamed.text))) == without_ids(checked(whole.json()))
    return whole.json()


async def prompt_of(server: Running, **fields: Any) -> str:
    """What the model read."""
    response = await server.respond(**fields)
    assert response.status_code == 200, response.text
    return server.tokenizer.decode(server.engine.submitted[-1].prompt_ids, skip_special_tokens=False)
