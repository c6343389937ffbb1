"""Whatever a body holds, it is read or refused in words: nothing of it is an error of ours."""

from __future__ import annotations

import contextlib
import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.responses import input_items
from server.api.responses.messages import messages_of
from server.api.responses.prepare import generate_request
from server.api.responses.request_types import RESPONSES
from server.api.responses.tools import Tools
from server.api.responses.tools import read as read_tools
from server.http.errors import ApiError

_WORDS = [
    "text",
    "auto",
    "function",
    "json_schema",
    "user",
    "assistant",
    "input_text",
    "output_text",
    "message",
    "high",
    "",
    "x",
]
LEAF = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(-3, 3), st.sampled_from(_WORDS))
_NAMES = [
    *("type", "role", "content", "text", "id", "name", "call_id", "arguments", "output", "summary", "effort", "format"),
    *("schema", "mode", "tools", "verbosity", "status", "phase", "caller", "namespace", "encrypted_content"),
]
JSON = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=5),
    max_leaves=12,
)
KINDS = ["message", "function_call", "function_call_output", "reasoning", "item_reference", "computer_call"]
ITEM = st.builds(
    lambda kind, fields, more: {**fields, **({"type": kind} if kind else {}), **more},
    st.sampled_from([None, *KINDS]),
    st.fixed_dictionaries({}, optional=dict.fromkeys(_NAMES, JSON)),
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "assistant", "developer"]), "content": st.just("Hi")}
    ),
)
FIELDS = [field.name for field in msgspec.structs.fields(type(RESPONSES.decode(b'{"input":"Hi"}')))]


@given(st.lists(ITEM, max_size=4))
def test_items_are_read_or_refused(items):
    with contextlib.suppress(ApiError):
        found = [item for item in input_items.read(items) if not isinstance(item, input_items.ItemReference)]
        listed = [input_items.to_json(item) for item in found]
        assert [input_items.to_json(input_items.from_json(json.dumps(item).encode())) for item in listed] == listed
        messages_of(found, "Be brief.")


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_fields_are_read_or_refused_as_the_client_s_fault_and_by_name(fields):
    body, refusal, made = {"input": "Hi", **fields}, None, None
    try:
        wire = RESPONSES.decode(json.dumps(body).encode(), [])
        if isinstance(wire.input, str):
            made = generate_request(
                wire, messages_of([], wire.instructions), read_tools(wire.tools or (), wire.tool_choice)
            )
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status == 400
        assert refusal.message
        assert refusal.param is None or re.split(r"[.\[]", refusal.param)[0] in body
    elif made is not None:
        assert made.max_tokens == fields.get("max_output_tokens")
        for name in {"temperature", "top_p", "top_k", "seed"} & fields.keys():
            assert getattr(made.sampling, name) == fields[name]
        assert made.cache_salt == fields.get("cache_salt")


@pytest.mark.parametrize(
    ("fields", "taken"), [({"top_k": 3, "stop": ["x"], "max_output_tokens": 5}, True), ({"top_k": "x"}, False)]
)
def test_some_fields_are_read_and_some_refused(fields, taken):
    """So that neither half of the above is about nothing."""
    with contextlib.nullcontext() if taken else pytest.raises(ApiError):
        wire = RESPONSES.decode(json.dumps({"input": "Hi", **fields}).encode(), [])
        assert generate_request(wire, messages_of([], None), Tools()).max_tokens == 5
