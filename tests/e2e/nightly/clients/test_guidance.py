"""guidance's models for vLLM and SGLang servers: its grammars hold what the model writes, in whichever field they come."""

from __future__ import annotations

import json
import re

import pytest
from guidance import assistant, gen, select, user
from guidance import json as json_of
from guidance.models import OpenAI
from guidance.models.experimental import SglangModel, VLLMModel

CITIES = ["Paris", "Rome"]
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "age": {"type": "integer"}},
    "required": ["city", "age"],
    "additionalProperties": False,
}


def written(kind, server, model: str, *, asked_for):
    """What `kind` says to a question, captured as `answer` by guidance."""
    lm = kind(model, base_url=server.base + "/v1", api_key="none")
    with user():
        lm += "Where is the Colosseum, and how old is it?"
    with assistant():
        lm += asked_for
    return lm["answer"]


@pytest.mark.parametrize("kind", [VLLMModel, SglangModel])
def test_grammars_hold(server, model, kind):
    assert written(kind, server, model, asked_for=select(CITIES, name="answer")) in CITIES
    assert re.fullmatch("[0-9]{4}", written(kind, server, model, asked_for=gen("answer", regex="[0-9]{4}")))
    both = "In " + select(CITIES, name="answer") + ", " + gen("age", regex="[0-9]{4}") + " years old"
    assert written(kind, server, model, asked_for=both) in CITIES


@pytest.mark.parametrize("kind", [VLLMModel, SglangModel, OpenAI])
def test_schemas_hold(server, model, kind):
    place = json.loads(written(kind, server, model, asked_for=json_of("answer", schema=PLACE)))
    assert place["city"] in CITIES
    assert isinstance(place["age"], int)


@pytest.mark.parametrize("kind", [VLLMModel, SglangModel, OpenAI])
def test_text_that_nothing_holds_is_text(server, model, kind):
    assert written(kind, server, model, asked_for=gen("answer", max_tokens=8))
