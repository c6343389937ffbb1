"""Bad requests of every kind: a 4xx in OpenAI's shape that names the field, and a server that goes on."""

from __future__ import annotations

import pytest

from runtime.api import ContextTooLong, EngineStopped, LoadProgress, QueueFull
from server.http.middleware import NotedOnce
from server.models.tokenizer import PIECE_CHARS
from tests.server.conftest import MESSAGES
from tests.server.tiny import VOCAB_SIZE

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def error_of(response, status: int, code: str | None = None) -> dict:
    """The error of an answer that has to be OpenAI's in every detail."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert "x-request-id" in response.headers
    if code is not None:
        assert error["code"] == code
    return error


USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
FIELDS = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"logprobs": 2}, "logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 512}, "truncate_prompt_tokens"),
    ({"truncation_side": "left"}, "truncation_side"),
    ({"truncate_prompt_tokens": 5, "truncation_side": "middle"}, "truncation_side"),
    ({"documents": "text"}, "documents"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1, 10**9]}, "allowed_token_ids"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"min_p": 1.01}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**30}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"logprobs": True, "logprob_token_ids": [1] * 129}, "logprob_token_ids"),
    ({"logprobs": True, "logprob_token_ids": [VOCAB_SIZE]}, "logprob_token_ids"),
    ({"bad_words": ["a", ""]}, "bad_words[1]"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"bad_words": "a"}, "bad_words"),
    ({"use_beam_search": True, "bad_words": ["x"]}, "bad_words"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"use_beam_search": True, "length_penalty": 10.5}, "length_penalty"),
    ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
    ({"use_beam_search": True, "top_p": 0.9}, "top_p"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
    ({"use_beam_search": True, "n": 128, "stop_token_ids": list(range(3, 240))}, "n"),
    ({"use_beam_search": True, "max_tokens": 0, "prompt_logprobs": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"max_tokens": 100_000}, "messages"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": "5"}, "stop_token_ids"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"priority": 1}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a" * 129}, "cache_salt"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"user": 5}, "user"),
    ({"metadata": "x"}, "metadata"),
    ({"model": 5}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [USER, {**USER, "colour": "red"}]}, "messages[1].colour"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
    ({"messages": [{**USER, "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{**USER, "reasoning": "x"}]}, "messages[0].reasoning"),
    ({"messages": [{**USER, "refusal": "x"}]}, "messages[0].refusal"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "mcp"}]}]}, "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "x": 1}]}]}, "messages[0].tool_calls[0].x"),
    ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
    ({"tools": []}, "tools"),
    ({"tools": [TOOL] * 513}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "web_search", "web_search": {}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "colour": "red"}}]}, "tools[0].function.colour"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"include_reasoning": 1}, "include_reasoning"),
    ({"request_id": "a b"}, "request_id"),
    ({"service_tier": "golden"}, "service_tier"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": [{"role": "assistant", "content": "first"}, USER]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"chat_template_kwargs": {"continue_final": True}}, "chat_template_kwargs.continue_final"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), FIELDS, ids=[f"{str(f)[:60]}-{i}" for i, (f, _) in enumerate(FIELDS)])
async def test_a_bad_value_is_refused_under_its_own_name(serve, fields, param):
    server = await serve()
    error = error_of(await server.chat(**fields), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert len(error["message"]) < 600
    assert server.engine.submitted == []
    assert (await server.chat()).status_code == 200


UNSUPPORTED = {
    "functions": [], "function_call": "auto", "guided_decoding_backend": "outlines",
    "echo": True, "chat_template": "{{ 1 }}",
    "audio": {}, "modalities": ["text", "audio"],
    "return_prompt_text": True, "repetition_detection": {},
    "watermarking": {}, "kv_transfer_params": {}, "ec_transfer_params": {}, "vllm_xargs": {"a": 1}, "stream_interval": 2,
    "spaces_between_special_tokens": False, "media_io_kwargs": {},
    "mm_payload": "x", "return_weight_versions": True, "return_token_offsets": True,
    "routed_experts_prompt_start": 1,
}  # fmt: skip


@pytest.mark.parametrize("field", UNSUPPORTED)
async def test_what_we_do_not_implement_is_refused_never_ignored(serve, field):
    server = await serve()
    error = error_of(await server.chat(**{field: UNSUPPORTED[field]}), 400, "unsupported_parameter")
    assert error["param"] == field
    assert field in error["message"]
    assert (await server.chat(**{field: None})).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [("store", True), ("prediction", {"type": "content", "content": "x"}), ("prompt_cache_retention", "24h")],
)
async def test_what_changes_nothing_of_the_answer_is_named_as_ignored_or_refused(serve, field, value):
    response = await (await serve()).chat(**{field: value})
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, field)
    strict = await serve(strict_fields=True)
    assert error_of(await strict.chat(**{field: value}), 400, "unsupported_parameter")["param"] == field


async def test_a_strict_server_names_an_unknown_field_with_a_guess_at_what_was_meant(serve):
    server = await serve(strict_fields=True)
    error = error_of(await server.chat(temprature=1), 400, "unknown_parameter")
    assert error["param"] == "temprature"
    assert "Unrecognized request argument supplied: temprature" in error["message"]
    assert "temperature" in error["message"]


async def test_otherwise_unknown_fields_are_named_in_a_header_and_the_log(serve, caplog):
    server = await serve("ab")
    response = await server.chat(temprature=1, **{"x y\r\nEvil": 2}, max_tokens=1)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "temprature, x?y??Evil"
    assert "evil" not in response.headers
    assert server.engine.submitted[0].params.max_tokens == 1
    assert "temprature" in caplog.text
    assert "x-ignored-fields" not in (await server.chat()).headers


async def test_the_log_has_a_set_of_ignored_fields_once_and_every_answer_has_its_header(serve, caplog):
    server = await serve()
    sets = [{"mood": 1}, {"mood": 2}, {"mood": 1, "voice": 1}, {"voice": 1, "mood": 1}, {"voice": 1}]
    for fields in sets:
        response = await server.chat(**fields)
        assert set(response.headers["x-ignored-fields"].split(", ")) == set(fields)
    lines = [record.getMessage() for record in caplog.records if "ignored fields" in record.getMessage()]
    assert len(lines) == 3


def test_the_sets_the_log_remembers_are_bounded():
    noted = NotedOnce(max_sets=2)
    assert [noted.is_new([name]) for name in "abab"] == [True, True, False, False]
    assert [noted.is_new([name]) for name in "cca"] == [True, False, True]


async def test_a_stream_names_them_too(serve):
    server = await serve("ab")
    response = await server.complete(stream=True, colour="red")
    assert response.headers["x-ignored-fields"] == "colour"
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("fields", [{"colour": 1, "temperature": 9}, {"colour": 1, "echo": True}])
async def test_an_unknown_field_hides_no_bad_one(serve, fields):
    server = await serve()
    assert (await server.chat(**fields)).status_code == 400


async def test_inside_a_message_nothing_unknown_is_let_by(serve):
    server = await serve()
    messages = [{"role": "user", "content": "Hi", "colour": "red"}]
    error_of(await server.chat(messages=messages), 400, "unknown_parameter")


async def test_a_huge_unknown_name_is_not_echoed_whole(serve):
    server = await serve()
    response = await server.chat(**{"x" * 100_000: 1})
    assert len(response.content) < 1500


async def test_an_unknown_model_is_404_and_tells_what_there_is(serve):
    server = await serve(served_model_name=("a", "b"))
    for path, body in (
        (CHAT, {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
    ):
        error = error_of(await server.post(path, {**body, "model": "gpt-9"}), 404, "model_not_found")
        assert error["param"] == "model"
        assert "'a', 'b'" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[", b"nonsense", b'{"messages": [}', b'{"a": NaN}', b'{"temperature": Infinity}', b"\xff\xfe{}",
        b'{"model": "\xff"}', b'{"model": "\xed\xa0\x80"}', b'{"model": "\\ud800"}', b"\xef\xbb\xbf{}", b'{"messages": []} x',
        b'{"metadata": ' + b'{"a":' * 20_000, b'{"metadata": {"a": ' + b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
async def test_a_body_that_is_not_json_is_400(serve, body):
    server = await serve()
    error_of(await server.http.post(CHAT, content=body, headers=JSON), 400)
    assert (await server.chat()).status_code == 200


@pytest.mark.parametrize("body", [b"[]", b"5", b'"text"', b"null", b"{}"])
async def test_json_of_the_wrong_kind_is_400(serve, body):
    server = await serve()
    error_of(await server.http.post(CHAT, content=body, headers=JSON), 400)


@pytest.mark.parametrize("given", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_another_content_type_is_415(serve, given):
    server = await serve()
    headers = {} if given is None else {"content-type": given}
    error_of(await server.http.post(CHAT, content=b"{}", headers=headers), 415, "unsupported_content_type")


async def test_a_charset_beside_the_content_type_is_fine(serve):
    server = await serve()
    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    response = await server.http.post(CHAT, content=body, headers={"content-type": "Application/JSON; charset=utf-8"})
    assert response.status_code == 200


async def test_a_body_over_the_limit_is_413_whether_announced_or_not(serve):
    server = await serve(max_body_size=2000)

    async def pieces():
        for _ in range(100):
            yield b" " * 100

    error_of(await server.http.post(CHAT, content=b" " * 2001, headers=JSON), 413, "request_too_large")
    error_of(await server.http.post(CHAT, content=pieces(), headers=JSON), 413, "request_too_large")
    assert (await server.chat()).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/nothing"), ("POST", "/v1/moderations"), ("GET", "/v1/chat"), ("GET", "/V1")],
)
async def test_an_unknown_route_is_404_in_the_same_shape(serve, method, path):
    server = await serve()
    error = error_of(await server.http.request(method, path), 404)
    assert method in error["message"]


async def test_another_method_is_405_and_tells_which_there_are(serve):
    server = await serve()
    for method, path, allowed in (("GET", CHAT, "POST"), ("DELETE", "/v1/models", "GET"), ("PUT", "/health", "GET")):
        response = await server.http.request(method, path)
        error_of(response, 405, "method_not_supported")
        assert allowed in response.headers["allow"]


async def test_a_bug_of_ours_is_500_with_nothing_inside(serve, caplog):
    def script(request):
        raise ZeroDivisionError("secret detail in /home/me/engine.py")

    server = await serve(script=script)
    for stream in (False, True):
        response = await server.chat(stream=stream)
        error = error_of(response, 500)
        assert error["type"] == "server_error"
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in error["message"]
    assert "secret detail" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code", "retries"),
    [
        (QueueFull(256, 256), 429, "rate_limit_exceeded", True),
        (EngineStopped("dead"), 503, "service_unavailable", True),
        (ContextTooLong(600, 512), 400, "context_length_exceeded", False),
    ],
)
async def test_the_engines_refusals_have_a_status_a_client_can_act_on(serve, refusal, status, code, retries, stream):
    server = await serve()
    server.engine.refuse = refusal
    response = await server.chat(stream=stream)
    error_of(response, status, code)
    assert ("retry-after" in response.headers) == retries
    if retries:
        assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/models", "/tokenize", "/detokenize"])
async def test_while_the_model_loads_there_is_503_with_retry_after(serve, path):
    server = await serve(loaded=False)
    server.service.lifecycle.report(LoadProgress("weights", 3, 10, "tensors"))
    response = await server.http.request("GET" if path == "/v1/models" else "POST", path, headers=JSON)
    error = error_of(response, 503, "service_unavailable")
    assert "weights" in error["message"]
    assert int(response.headers["retry-after"]) >= 1


async def test_over_long_text_is_refused_at_the_cost_of_its_beginning(serve, monkeypatch):
    server = await serve(max_model_len=64)
    lengths = []
    encode = type(server.tokenizer).encode
    monkeypatch.setattr(
        type(server.tokenizer),
        "encode",
        lambda self, text, *more: lengths.append(len(text)) or encode(self, text, *more),
    )
    error = error_of(await server.complete(prompt="word " * 100_000), 400, "context_length_exceeded")
    assert error["param"] == "prompt"
    assert 0 < sum(lengths) <= PIECE_CHARS


async def test_text_that_only_looks_too_long_is_tokenised_whole(serve, monkeypatch):
    """A tokenizer may make little of much: only its own word counts."""
    server = await serve(max_model_len=64)
    monkeypatch.setattr(type(server.tokenizer), "encode", lambda self, text, *more: [70] * (len(text) // 100))
    assert (await server.complete(prompt="x" * 5000, max_tokens=1)).status_code == 200
    assert len(server.engine.submitted[0].prompt_ids) == 50
