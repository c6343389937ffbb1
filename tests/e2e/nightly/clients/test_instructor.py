"""instructor's modes: a pydantic model filled by a forced call or by a schema, over chats and Responses, whole and in parts."""

from __future__ import annotations

from typing import Literal

import instructor
import pytest
from instructor import Mode
from pydantic import BaseModel

ASK = {"messages": [{"role": "user", "content": "Where is the Colosseum, and how old is it?"}], "temperature": 0}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    age: int


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS])
def test_every_mode_fills_the_model(server, model, mode):
    """RESPONSES_TOOLS forces a call and gives text a format in the same request."""
    client = instructor.from_openai(server.client(), mode=mode)
    place = client.create(model=model, response_model=Place, max_retries=0, **ASK)
    assert isinstance(place, Place)


def test_a_model_fills_up_while_the_call_streams(server, model):
    client = instructor.from_openai(server.client(), mode=Mode.TOOLS)
    *begun, place = client.create_partial(model=model, response_model=Place, **ASK)
    assert begun[0].city is None
    assert place.city in ("Paris", "Rome")
    assert isinstance(place.age, int)
