"""Structured outputs over HTTP: which matchers the engine gets for which field, and what is refused under which name."""

from __future__ import annotations

import json
import threading

import pytest

from server import LLM, SamplingParams
from server.generate.structured.compiler import Grammars
from server.models.defaults import sampling_defaults
from server.models.model import LoadedModel
from tests.fakes import FakeEngine, fake_model
from tests.server.structured.reading import reads
from tests.server.test_refusals import error_of
from tests.server.tiny import EOS, VOCAB_SIZE, chatml, loaded_model, tiny_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
NAMED = {"name": "answer", "schema": SCHEMA, "strict": True}
FORMAT = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}

REQUESTS = [
    ({"response_format": {"type": "json_object"}}, ['{"b":[]}'], ["[]"]),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, ['{"a":1}', '{"a": 1}'], ['{"b":1}', '{"a":1,"b":2}']),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}}, ["1"], ["x"]),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ['{"a":1}'], ['{"b":1}']),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, ['{"a":1}'], ['{"b":1}']),
    ({"response_format": {"type": "json_object", "value": SCHEMA, "schema": SCHEMA}}, ['{"a":1}'], ['{"b":1}']),
    ({"response_format": {"type": "json", "value": SCHEMA}}, ['{"a":1}'], ['{"b":1}']),
    ({"response_format": {"type": "json", "value": json.dumps(SCHEMA)}}, ['{"a":1}'], ['{"b":1}']),
    ({"response_format": {"type": "regex", "value": "[0-9]+"}}, ["12"], ["a"]),
    ({"response_format": {"type": "structural_tag", "format": FORMAT}}, ['<f>{"a":1}</f>'], ["text"]),
    ({"response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["<f>"]}}, ["a", 'b<f>{"a":1}</f>'], ["<f>"]),
    ({"structured_outputs": {"json": SCHEMA}}, ['{"a":1}'], ["{}"]),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ['{"a":1}'], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["1"]),
    ({"structured_outputs": {"regex": "[0-9]+"}}, ["12"], ["a"]),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes"], ["maybe"]),
    ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, ["x"], ["z"]),
    ({"structured_outputs": {"structural_tag": {"format": FORMAT}}}, ['<f>{"a":1}</f>'], ["text"]),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": FORMAT})}}, ['<f>{"a":1}</f>'], ["text"]),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, ['{"a":1}'], ['{"a": 1}']),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]"}}, ['{"a": 1}'], ['{"a":\n1}']),
    ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}}, ['{"a":1}'], ['{"a":1,"b":2}']),
    ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}}, ['{"a":1,"b":2}'], ['{"a":1,"a":2}']),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, ['{ "a" :\n1}'], [" {}"]),
    ({"structured_outputs": {"json_object": False, "regex": "a"}}, ["a"], ["b"]),
    ({"guided_json": SCHEMA}, ['{"a":1}'], ["{}"]),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]"}, ['{"a": 1}'], ['{"a":\n1}']),
    ({"guided_regex": "[0-9]+"}, ["12"], ["a"]),
    ({"guided_choice": ["yes", "no"], "guided_decoding_backend": "auto"}, ["yes"], ["maybe"]),
    ({"guided_grammar": 'start: "x" | "y"\n'}, ["x"], ["z"]),
]  # fmt: skip


def check_matchers(tokenizer, params, taken: list[str], refused: list[str]) -> None:
    (make,) = params.matchers
    assert [reads(make(), tokenizer.encode(text)) for text in taken] == [True] * len(taken)
    assert [reads(make(), tokenizer.encode(text)) for text in refused] == [False] * len(refused)


@pytest.mark.parametrize(("fields", "taken", "refused"), REQUESTS, ids=[str(fields)[:60] for fields, _, _ in REQUESTS])
async def test_the_engine_is_held_to_what_was_asked_for_by_chat_and_completions_alike(serve, fields, taken, refused):
    server = await serve()
    for answer in (await server.chat(**fields, n=2), await server.complete(**fields, n=2)):
        assert answer.status_code == 200, answer.text
        assert "x-ignored-fields" not in answer.headers
    assert len(server.engine.submitted) == 4
    for request in server.engine.submitted:
        check_matchers(server.tokenizer, request.params, taken, refused)


@pytest.mark.parametrize("format", [None, {"type": "text"}])
async def test_who_asks_for_no_form_gets_no_matcher(serve, format):
    server = await serve()
    assert (await server.chat(response_format=format, structured_outputs=None)).status_code == 200
    assert server.engine.submitted[0].params.matchers == ()


def response_format(**fields) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **fields}}}


def deep(levels: int) -> dict:
    schema: dict = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


REFUSED = [
    ({"response_format": "json"}, "response_format", ""),
    ({"response_format": {}}, "response_format.type", ""),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
    (response_format(), "response_format.json_schema.schema", "Missing"),
    (response_format(schema="x"), "response_format.json_schema.schema", "expected"),
    (response_format(schema={"type": "colour"}), "response_format.json_schema.schema", "colour"),
    (response_format(schema={"not": {}}), "response_format.json_schema.schema", "not"),
    (response_format(schema=deep(80)), "response_format.json_schema.schema", "deeper than 64"),
    (response_format(schema={"enum": ["x" * 200_000]}), "response_format.json_schema.schema", "131072"),
    (response_format(schema={}, strict="yes"), "response_format.json_schema.strict", ""),
    ({"response_format": {"type": "json_object", "value": SCHEMA, "schema": {}}}, "response_format.schema", "more than one"),
    ({"response_format": {"type": "json"}}, "response_format.value", "Missing"),
    ({"response_format": {"type": "regex", "value": "("}}, "response_format.value", "unclosed"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format", "either"),
    ({"response_format": {"type": "structural_tag", "format": {}, "triggers": []}}, "response_format.triggers", "together"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "response_format", "'x' is not supported"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format", "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "guided_regex"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "structured_outputs.regex", "guided_regex"),
    ({"structured_outputs": {}}, "structured_outputs", "there is none"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "there is none"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a", "colour": 1}}, "structured_outputs.colour", "Unrecognized"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", ""),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", ""),
    ({"structured_outputs": {"grammar": "%%"}}, "structured_outputs.grammar", "cannot be read"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", "not JSON"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs.json", "unclosed"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
     "structured_outputs.whitespace_pattern", "contradict"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace", "regex"),
    ({"guided_json": {}, "guided_choice": ["a"]}, "guided_json", "guided_choice"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "no field requests JSON"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "regex"),
    ({"guided_grammar": "%%"}, "guided_grammar", "cannot be read"),
    ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format", "beam_search"),
    ({"use_beam_search": True, "structured_outputs": {"regex": "a"}}, "structured_outputs", "beam_search"),
    ({"use_beam_search": True, "guided_regex": "a"}, "guided_regex", "beam_search"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[str(fields)[:60] for fields, _, _ in REFUSED])
async def test_what_cannot_be_honoured_is_refused_under_its_own_name(serve, fields, param, words):
    server = await serve()
    error = error_of(await server.chat(**fields), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert len(error["message"]) < 600
    assert server.engine.submitted == []
    assert (await server.chat()).status_code == 200


async def test_a_form_that_takes_too_long_to_compile_is_refused_and_the_next_request_is_served(serve, monkeypatch):
    server = await serve()
    refused, compile = threading.Event(), Grammars._compile

    def compile_late(self, grammar):
        refused.wait()
        return compile(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", compile_late)
    monkeypatch.setattr("server.generate.structured.compiler.MAX_COMPILE_S", 0.0)
    try:
        error = error_of(await server.chat(response_format={"type": "json_object"}), 400)
    finally:
        refused.set()
    assert error["param"] == "response_format"
    assert "takes longer than 0 s" in error["message"]
    monkeypatch.setattr("server.generate.structured.compiler.MAX_COMPILE_S", 3600.0)
    assert (await server.chat(response_format={"type": "json_object"})).status_code == 200


def test_the_python_api_takes_the_same_fields(monkeypatch):
    tokenizer = tiny_tokenizer()
    engine: list[FakeEngine] = []

    async def load(config, report, cancel) -> LoadedModel:
        model = fake_model(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}), max_model_len=200)
        engine.append(FakeEngine(lambda request: [EOS], model=model))
        return loaded_model(engine[0], tokenizer, chatml(tokenizer), sampling_defaults(), ("tiny",))

    monkeypatch.setattr("server.llm.core.load", load)
    with LLM("tiny") as llm:
        llm.generate("a", SamplingParams(structured_outputs={"choice": ["yes"]}), use_tqdm=False)
        messages = [{"role": "user", "content": "a"}]
        llm.chat(messages, SamplingParams(response_format={"type": "json_object"}), use_tqdm=False)
        with pytest.raises(ValueError, match=r"structured_outputs.regex: .*unclosed"):
            llm.generate("a", SamplingParams(structured_outputs={"regex": "("}), use_tqdm=False)
        with pytest.raises(ValueError, match="exactly one kind"):
            SamplingParams(structured_outputs={})
    first, second = engine[0].submitted
    check_matchers(tokenizer, first.params, ["yes"], ["no"])
    check_matchers(tokenizer, second.params, ["{}"], ["no"])
