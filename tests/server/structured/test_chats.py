"""Forced calls: whatever is drawn under a chat's form, the tool parser reads back as calls whose arguments follow their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from server.generate.structured.chats import ChatGrammar, FunctionRule
from server.generate.structured.compiler import Grammars
from server.generate.structured.grammar import ANY_OBJECT, Alternatives, GrammarError
from server.models.tokenizer import Tokenizer
from server.text.tools.registry import TOOL_PARSERS, create
from server.text.tools.schemas import properties_of, types_of
from tests.server.structured.random_schemas import Writer, random_parameters
from tests.server.structured.reading import accepted
from tests.server.text.tool_samples import KIMI, V3, V31, Meaning, meaning
from tests.server.tiny import EOS, SPECIAL, tiny_tokenizer
from tests.tiers import on_push

every_tool_parser = pytest.mark.parametrize("tool_parser", TOOL_PARSERS)
a_few_tool_parsers = pytest.mark.parametrize("tool_parser", on_push(TOOL_PARSERS, "hermes", "harmony", "qwen3_coder"))
special_or_spelled = pytest.mark.parametrize("special", [True, False])

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "metric": {"type": "boolean"},
        "unit": {"$ref": "#/$defs/unit"},
        "code": {"$ref": "#/$defs/code"},
        "note": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}], "default": None},
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
        "where": {
            "type": "object", "properties": {"lat": {"type": "number"}, "of": {"enum": ["a", 5, None]}},
            "required": ["lat"], "additionalProperties": False,
        },
    },
    "required": ["city", "code", "where"],
    "$defs": {"unit": {"enum": ["c", "f"]}, "code": {"type": "string", "pattern": "^[0-9]{3}$"}},
}  # fmt: skip
TIME: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTIONS = (FunctionRule("get_weather", WEATHER), FunctionRule("time", TIME))
CLOSES = {"glm45": "</arg_value>", "qwen3_coder": "\n</parameter>", "functiongemma": "<escape>", "harmony": "<|end|>"}


def speaker(tool_parser: str, *, special: bool = True) -> Tokenizer:
    return tiny_tokenizer(*sorted(TOOL_PARSERS[tool_parser].strings() - set(SPECIAL)) if special else ())


class Caller(Writer):
    """Knows how to end a value between tags, one with the pattern `x.?y` too."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, tool_parser: str) -> None:
        super().__init__(tokenizer, frozenset({EOS}), rng, patience=80)
        close = CLOSES.get(tool_parser, "")
        self._endings = [
            tokenizer.encode(lead + close, add_special_tokens=False) for lead in ("", "xy" if close else "")
        ]
        self._coming: list[int] = []

    def next(self, mask: bytes, num_drawn: int) -> int:
        if not self._coming and num_drawn >= self._patience and self._rng.random() < 0.2:
            self._coming = self._rng.choice(self._endings)[::-1]
        if self._coming:
            token = self._coming.pop()
            if token >> 3 < len(mask) and mask[token >> 3] >> (token & 7) & 1:
                return token
            self._coming = []
        return super().next(mask, num_drawn)


async def drawn(form: ChatGrammar, tokenizer: Tokenizer, seed: int) -> str:
    make = await Grammars(tokenizer, frozenset({EOS})).factory(form)
    ids = Caller(tokenizer, random.Random(seed), form.tool_parser).write(make())
    return tokenizer.decode(ids, skip_special_tokens=False)


def read(form: ChatGrammar, text: str) -> Meaning:
    tools = [
        {"type": "function", "function": {"name": function.name, "parameters": function.schema}}
        for function in form.functions
    ]
    return meaning(create(form.tool_parser, tools), [text])


def check_calls(form: ChatGrammar, found: Meaning) -> None:
    assert not found.malformed
    schemas = {function.name: function.schema for function in form.functions}
    for (name, _), arguments in zip(found.calls, found.arguments, strict=True):
        jsonschema.Draft202012Validator(schemas[name]).validate(json.loads(arguments))


@a_few_tool_parsers
@special_or_spelled
async def test_whatever_is_drawn_is_read_back_as_calls_that_follow_their_schemas(tool_parser, special):
    form = ChatGrammar(tool_parser, FUNCTIONS, must_call=True, several=True)
    for seed in range(20):
        text = await drawn(form, speaker(tool_parser, special=special), seed)
        found = read(form, text)
        check_calls(form, found)
        assert found.calls
        assert tool_parser == "harmony" or not found.text


@a_few_tool_parsers
async def test_random_schemas_are_followed_or_refused_in_words(tool_parser):
    tokenizer, refusals = speaker(tool_parser), []
    for seed in range(60):
        functions = (FunctionRule("f", random_parameters(random.Random(seed))),)
        form = ChatGrammar(tool_parser, functions, must_call=True, several=False)
        try:
            text = await drawn(form, tokenizer, seed)
        except GrammarError as error:
            refusals.append(str(error))
            continue
        found = read(form, text)
        check_calls(form, found)
        assert len(found.calls) == 1
    assert all("this model" in refusal for refusal in refusals)
    assert not refusals or tool_parser in ("pythonic", "functiongemma")


# --- what templates write -----------------------------------------------------------------------------------------

ARGS = '{"a": 1, "b": "x"}'
CALL, TIME_CALL = f'{{"name": "f", "arguments": {ARGS}}}', '{"name": "time", "arguments": {}}'
XML = "<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
TWO = (
    FunctionRule("f", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}),
    FunctionRule("time", TIME),
)  # fmt: skip
WRITTEN = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{TIME_CALL}\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n<function=f>\n{XML}</function>\n</tool_call>\n"
    "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "llama3_json": f'{{"name": "f", "parameters": {ARGS}}}; {{"name": "time", "parameters": {{}}}}',
    "pythonic": '[f(a=1, b="x"), time()]',
    "mistral": f"[TOOL_CALLS]f[ARGS]{ARGS}[TOOL_CALLS]time[ARGS]{{}}",
    "deepseek_v3": f"<｜tool▁calls▁begin｜>{V3.format('f', ARGS)}\n{V3.format('time', '{}')}<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜>{V31.format('f', ARGS)}{V31.format('time', '{}')}<｜tool▁calls▁end｜>",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    f"<|constrain|>json<|message|>{ARGS}",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x</arg_value>\n"
    "</tool_call>\n<tool_call>time\n</tool_call>",
    "kimi_k2": f"<|tool_calls_section_begin|>{KIMI.format('f', 0, ARGS)}{KIMI.format('time', 1, '{}')}<|tool_calls_section_end|>",
    "granite": f"<|tool_call|>[{CALL}, {TIME_CALL}]",
    "phi4": f"<|tool_call|>[{CALL}, {TIME_CALL}]<|/tool_call|>",
    "functiongemma": "<start_function_call>call:f{a:1,b:<escape>x<escape>}<end_function_call>"
    "<start_function_call>call:time{}<end_function_call>",
}  # fmt: skip


def broken(text: str) -> list[str]:
    """Texts that call what is not there, pass what is not allowed, or stop in the middle."""
    return [
        text.replace("time", "tame"),
        text.replace("1", '"one"', 1),
        text.replace("a", "ä", 1),
        text[:-1],
        f"Hi {text}",
    ]


@every_tool_parser
async def test_what_the_models_template_writes_is_taken_and_what_is_no_such_call_is_not(tool_parser):
    text = WRITTEN[tool_parser]
    form = ChatGrammar(tool_parser, TWO, must_call=True, several=True)
    others = [other for other in broken(text) if other != text]
    assert await accepted(form, text, *others, "", tokenizer=speaker(tool_parser)) == {text}
    check_calls(form, read(form, text))


@pytest.mark.parametrize(
    ("tool_parser", "text"),
    [
        ("mistral", f"[TOOL_CALLS] [{CALL}, {TIME_CALL}]"),
        ("granite", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{TIME_CALL}\n</tool_call>"),
        ("phi4", f"functools[{CALL}, {TIME_CALL}]"),
    ],
)
async def test_a_tokenizer_without_the_newer_marks_gets_the_older_form(tool_parser, text):
    form = ChatGrammar(tool_parser, TWO, must_call=True, several=True)
    assert await accepted(form, text, WRITTEN[tool_parser]) == {text}


@pytest.mark.parametrize("tool_parser", sorted(TOOL_PARSERS.keys() - {"harmony"}))
async def test_one_call_where_only_one_is_wanted(tool_parser):
    several = ChatGrammar(tool_parser, TWO, must_call=True, several=True)
    one = ChatGrammar(tool_parser, TWO[1:], must_call=True, several=False)
    tokenizer = speaker(tool_parser)
    text = await drawn(one, tokenizer, 1)
    assert [name for name, _ in read(one, text).calls] == ["time"]
    assert await accepted(several, text, tokenizer=tokenizer) == {text}
    assert await accepted(one, WRITTEN[tool_parser], tokenizer=tokenizer) == set()


# --- calls that may be left out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tool_parser", sorted(TOOL_PARSERS.keys() - {"harmony"}))
@special_or_spelled
async def test_where_no_call_is_wanted_any_text_is_taken_but_no_call_that_breaks_its_schema(tool_parser, special):
    tokenizer = speaker(tool_parser, special=special)
    form = ChatGrammar(tool_parser, TWO, must_call=False, several=True)
    calls = await drawn(ChatGrammar(tool_parser, TWO[1:], must_call=True, several=True), tokenizer, 3)
    marked = not TOOL_PARSERS[tool_parser].bare
    texts = {"", "Hi. [1] {} <b>", "The answer is no."}
    with_call = {calls, *([f"Let me see. {calls}", f"{calls}\nDone."] if marked else [])}
    taken = await accepted(form, *texts, *with_call, calls.replace("time", "tame"), tokenizer=tokenizer)
    assert taken == texts | with_call


async def test_in_harmony_an_answer_on_its_channel_is_as_good_as_a_call():
    form = ChatGrammar("harmony", TWO, must_call=False, several=True)
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi."
    wrong = WRITTEN["harmony"].replace("1", '"one"')
    assert await accepted(form, answer, WRITTEN["harmony"], wrong, tokenizer=speaker("harmony")) == {
        answer,
        WRITTEN["harmony"],
    }


@every_tool_parser
async def test_an_answer_with_a_form_of_its_own_stands_beside_the_calls(tool_parser):
    form = ChatGrammar(tool_parser, TWO, must_call=False, several=True, answer=Alternatives(("yes", "no")))
    lead = "<|channel|>final<|message|>" if tool_parser == "harmony" else ""
    texts = {f"{lead}yes", f"{lead}no", WRITTEN[tool_parser]}
    assert await accepted(form, *texts, f"{lead}maybe", "", tokenizer=speaker(tool_parser)) == texts


async def test_harmony_without_tools_holds_the_final_channel_alone_to_the_form():
    form = ChatGrammar("harmony", (), must_call=False, several=True, answer=ANY_OBJECT)
    thought, final = "<|channel|>analysis<|message|>anything<|end|><|start|>assistant", "<|channel|>final<|message|>{}"
    tokenizer = speaker("harmony")
    assert await accepted(form, thought + final, final, "{}", thought + final + "x", tokenizer=tokenizer) == {
        thought + final,
        final,
    }


# --- what is refused ----------------------------------------------------------------------------------------------


def holding(value: Any, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": value}, **others}


def test_what_a_schema_allows_is_soon_found_however_many_ways_it_takes():
    root = {"$defs": doubling(60)}
    assert types_of({"$ref": "#/$defs/55"}, root) == {"string"}
    assert types_of({"$ref": "#/$defs/0"}, root) == frozenset()
    assert types_of({"anyOf": [{"const": 5}, {"enum": ["a", None]}, {"type": ["boolean"]}]}, {}) == {
        "integer", "string", "null", "boolean",
    }  # fmt: skip
    assert types_of({"anyOf": [{"type": "string"}, {}]}, {}) == frozenset()
    assert properties_of({"$ref": "#"}) == properties_of({"properties": 5}) == {}


def doubling(levels: int) -> dict[str, Any]:
    """Definitions of which each allows the next one in two ways."""
    defs = {str(level): {"anyOf": [{"$ref": f"#/$defs/{level + 1}"}] * 2} for level in range(levels)}
    return {**defs, str(levels): {"type": "string"}}


@pytest.mark.parametrize(
    ("tool_parser", "schema", "words"),
    [
        ("hermes", {"type": "string"}, "an object, not"),
        ("hermes", holding({"type": "colour"}), "colour"),
        ("hermes", holding({"enum": ["x" * 140_000]}), "at most"),
        ("qwen3_coder", {"type": "object", "additionalProperties": {"type": "string"}}, "lists all arguments"),
        ("qwen3_coder", holding({}, required=["b"]), "lists all arguments"),
        ("qwen3_coder", holding({}, minProperties=1), "lists all arguments"),
        ("qwen3_coder", {"type": "object", "properties": {"a>": {}}}, "'a>'"),
        ("qwen3_coder", holding({"type": "string", "pattern": "^a|b$"}), "parentheses"),
        ("qwen3_coder", holding({"type": "string", "pattern": "(" * 2000}), "at most 1000"),
        ("qwen3_coder", holding({"type": "string", "format": "colour"}), "colour"),
        ("qwen3_coder", holding({"type": "string", "maxLength": "x"}), "maxLength"),
        ("qwen3_coder", holding({"type": "string", "not": {"const": "x"}}), "not"),
        ("qwen3_coder", holding({"minLength": 1, "anyOf": [{"minLength": 2}]}), "minLength"),
        ("glm45", holding({"$ref": "#/properties/a"}), "endless recursion"),
        ("glm45", holding({"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}]}), "endless recursion"),
        ("glm45", holding({"$ref": "#/$defs/0"}, **{"$defs": doubling(20)}), "too many alternatives"),
        ("functiongemma", {"type": "object", "properties": {name: {"$ref": "#"} for name in "abcdefgh"}}, "nested|too many"),
        ("glm45", holding({}, required=5), "list of names"),
        ("glm45", {"type": "object", "properties": 5, "required": ["a"]}, "lists all arguments"),
        ("qwen3_coder", holding({"type": "string", "format": ["date"]}), "date"),
        ("qwen3_coder", holding({"type": "string", "pattern": "^[" + r"\a" * 400}), "regex|unclosed|pattern|pars"),
        ("pythonic", {"type": "object", "properties": {"a-b": {}}}, "a-b"),
        ("functiongemma", holding({"enum": [{}]}), "enum of objects"),
        ("functiongemma", holding({"$ref": "#"}), "nested deeper"),
        ("functiongemma", holding({"allOf": [{}, {}]}), "the type of each value"),
        ("functiongemma", holding({"type": "array", "prefixItems": [{}]}), "lists"),
    ],
)  # fmt: skip
async def test_a_schema_that_cannot_be_followed_is_refused_in_words(tool_parser, schema, words):
    form = ChatGrammar(tool_parser, (FunctionRule("f", schema),), must_call=True, several=False)
    with pytest.raises(GrammarError, match=words) as caught:
        await Grammars(speaker(tool_parser), frozenset({EOS})).factory(form)
    assert len(str(caught.value)) < 500


async def test_many_tools_compile_within_the_limits_beside_a_thousand_special_tokens():
    functions = tuple(FunctionRule(f"f{number}", WEATHER) for number in range(128))
    for tool_parser in ("hermes", "qwen3_coder"):
        reserved = [f"<|reserved_{number}|>" for number in range(1000)]
        tokenizer = tiny_tokenizer(*sorted(TOOL_PARSERS[tool_parser].strings() - set(SPECIAL)), *reserved)
        assert await Grammars(tokenizer, frozenset({EOS})).factory(ChatGrammar(tool_parser, functions, True, True))
