"""llama.cpp's /completion, /infill, /props and /slots: their answers, their grammars, and what its editor plug-ins send."""

from __future__ import annotations

import json

import pytest

from server.api.llamacpp.frames import selected
from tests.server.test_infill import QWEN
from tests.server.tiny import EOS, tiny_tokenizer


async def complete(server, **fields):
    response = await server.post("/completion", {"prompt": "Hi", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def pieces(server, path: str = "/completion", **fields) -> list[dict]:
    response = await server.post(path, {"stream": True, **fields})
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events.pop() == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def prompt_of(server, index: int = -1) -> str:
    return server.tokenizer.decode(server.engine.submitted[index].prompt_ids, skip_special_tokens=False)


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_a_prompt_is_continued(serve, path):
    server = await serve()
    body = (await server.post(path, {"prompt": "Hi", "temperature": 0.5, "seed": 7, "n_predict": 64})).json()
    assert (body["content"], body["stop"], body["stop_type"]) == ("Hello there", True, "eos")
    assert (body["prompt"], body["tokens_evaluated"], body["tokens_predicted"]) == ("Hi", 2, 12)
    assert body["model"] == "tiny"
    assert body["tokens"] == []
    settings = body["generation_settings"]
    assert (settings["temperature"], settings["seed"], settings["n_predict"]) == (0.5, 7, 64)
    assert body["timings"]["predicted_n"] == 12
    assert body["timings"]["prompt_n"] == 2
    assert body["timings"]["predicted_ms"] > 0


async def test_pieces_come_as_they_are_written_and_the_last_says_the_rest(serve):
    server = await serve("a\nb")
    *begun, last = await pieces(server, prompt="Hi")
    assert [piece["content"] for piece in begun] == ["a", "\n", "b"]
    assert [piece["tokens"] for piece in begun] == [[id] for id in server.tokenizer.encode("a\nb")]
    assert not any(piece["stop"] for piece in begun)
    assert (last["stop"], last["content"], last["stop_type"], last["has_new_line"]) == (True, "", "eos", True)
    assert last["tokens_predicted"] == 4
    timed = await pieces(server, prompt="Hi", timings_per_token=True)
    assert [piece["timings"]["predicted_n"] for piece in timed] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fields", "content", "kind", "word"),
    [
        ({"n_predict": 3}, "Hel", "limit", ""),
        ({"max_tokens": 3}, "Hel", "limit", ""),
        ({"stop": ["lo"]}, "Hel", "word", "lo"),
        ({"stop": "lo"}, "Hel", "word", "lo"),
        ({}, "Hello there", "eos", ""),
    ],
)
async def test_it_says_why_it_stopped(serve, fields, content, kind, word):
    server = await serve()
    body = await complete(server, **fields)
    assert (body["content"], body["stop_type"], body["stopping_word"]) == (content, kind, word)


async def test_nothing_is_predicted_where_nothing_is_wanted(serve):
    server = await serve()
    body = await complete(server, n_predict=0)
    assert (body["content"], body["tokens_predicted"], body["tokens_evaluated"]) == ("", 0, 2)


@pytest.mark.parametrize("n_predict", [-1, 10**9])
async def test_an_answer_takes_what_the_context_holds(serve, n_predict):
    server = await serve(max_model_len=100)
    await complete(server, n_predict=n_predict)
    assert server.engine.submitted[0].params.max_tokens == 98


async def test_prompts_of_ids_objects_and_several(serve):
    server = await serve()
    ids = server.tokenizer.encode("abc")
    assert (await complete(server, prompt=ids))["prompt"] == "abc"
    assert (await complete(server, prompt={"prompt_string": "abc"}))["prompt"] == "abc"
    assert [each["prompt"] for each in await complete(server, prompt=["a", ids, {"prompt_string": "b"}])] == [
        "a",
        "abc",
        "b",
    ]
    assert [each["prompt"] for each in await complete(server, prompt=["a"])] == ["a"]
    assert [each["index"] for each in await complete(server, prompt="a", n_cmpl=2)] == [0, 1]
    streamed = await pieces(server, prompt=["a", "b"])
    assert sorted(piece["index"] for piece in streamed if piece["stop"]) == [0, 1]


async def test_probabilities_and_tokens_on_request(serve):
    server = await serve("ab")
    body = await complete(server, n_probs=2, return_tokens=True)
    assert body["tokens"] == [*server.tokenizer.encode("ab"), EOS]
    first = body["completion_probabilities"][0]
    assert (first["token"], first["id"], len(first["top_logprobs"])) == ("a", body["tokens"][0], 2)
    assert first["bytes"] == [97]
    streamed = await pieces(server, prompt="Hi", n_probs=1)
    assert [entry["token"] for piece in streamed for entry in piece["completion_probabilities"]] == ["a", "b"]


async def test_only_the_fields_that_are_wanted(serve):
    server = await serve()
    body = await complete(
        server, response_fields=["content", "timings/predicted_n", "generation_settings/top_k", "nothing/x"]
    )
    assert body == {"content": "Hello there", "predicted_n": 12, "top_k": 0}
    assert (await pieces(server, prompt="Hi", response_fields=["stop_type"]))[-1] == {"stop_type": "eos"}


def test_a_field_that_is_no_object_has_none_inside():
    assert selected({"a": 1, "b": None}, ["a/b", "b"]) == {"b": None}


async def test_a_client_who_leaves_frees_the_engine(serve):
    server = await serve(paused=True)
    answer = await server.open_stream("/completion", prompt="Hi", stream=True)
    await server.engine.until(lambda: bool(server.engine.live))
    answer.leave()
    await server.engine.until(lambda: not server.engine.live)


async def test_an_engine_that_fails_is_an_event(serve):
    server = await serve(paused=True)
    answer = await server.open_stream("/completion", prompt="Hi", stream=True)
    await answer.head()
    server.engine.step()
    server.engine.fail("out of memory")
    last = (await answer.chunks())[-1]
    assert "out of memory" not in last.decode()
    assert json.loads(last.split(b"data: ")[-1])["error"]["type"] == "server_error"


# --- fields -------------------------------------------------------------------------------------------------------


async def test_fields_reach_the_engine(serve):
    server = await serve()
    await complete(
        server, temperature=-1, top_k=3, top_p=0.8, min_p=0.1, seed=9, repeat_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.4, ignore_eos=True, n_predict=5, logit_bias=[[5, 1.5], [6, False]],
    )  # fmt: skip
    params = server.engine.submitted[0].params
    seen = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.repetition_penalty)
    assert seen == (0, 3, 0.8, 0.1, 9, 1.2)
    assert (params.presence_penalty, params.frequency_penalty, params.ignore_eos) == (0.3, 0.4, True)
    assert params.logit_bias[5] == 1.5
    assert params.logit_bias[6] < -1e6
    await complete(server, logit_bias={"7": -2}, seed=2**32 - 1, repeat_last_n=0, repeat_penalty=1.3)
    params = server.engine.submitted[1].params
    assert (dict(params.logit_bias), params.seed, params.repetition_penalty) == ({7: -2}, None, 1.0)


async def test_an_answer_is_held_to_a_grammar_or_a_schema(serve):
    server = await serve("yes")
    await complete(server, grammar='root ::= "yes" | "no"')
    assert server.engine.submitted[-1].params.matchers
    await complete(server, json_schema={})
    assert server.engine.submitted[-1].params.matchers
    await complete(server, grammar="", json_schema=None)
    assert not server.engine.submitted[-1].params.matchers


async def test_a_prompt_that_is_not_to_be_cached_finds_nothing(serve):
    server = await serve()
    for _ in range(2):
        await complete(server, cache_prompt=False)
    await complete(server, cache_prompt=True)
    first, second, third = (request.cache_salt for request in server.engine.submitted)
    assert third is None
    assert None not in (first, second)
    assert first != second


async def test_what_editors_send_is_taken_and_what_does_nothing_is_named(serve):
    """As llama.vim and llama.vscode have it."""
    server = await serve(speaks=tiny_tokenizer(*QWEN))
    response = await server.post(
        "/infill",
        {
            "input_prefix": "def f(a):\n", "input_suffix": "\nf(1)\n",
            "input_extra": [{"text": "x = 1", "time": 5, "filename": "a.py"}],
            "prompt": "    ", "n_predict": 128, "n_indent": 4, "top_k": 40, "top_p": 0.90, "stream": False,
            "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
            "response_fields": ["content", "timings/prompt_n", "timings/prompt_ms", "truncated", "tokens_cached"],
        },
    )  # fmt: skip
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["content"], body["truncated"]) == ("Hello there", False)
    assert set(response.headers["x-ignored-fields"].split(", ")) == {
        "samplers",
        "n_indent",
        "t_max_prompt_ms",
        "t_max_predict_ms",
    }
    assert prompt_of(server) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>filename\n"
        "<|fim_prefix|>def f(a):\n<|fim_suffix|>\nf(1)\n<|fim_middle|>    "
    )


async def test_the_middle_is_streamed(serve):
    server = await serve("ab", speaks=tiny_tokenizer(*QWEN))
    streamed = await pieces(server, "/infill", input_prefix="x", input_suffix="y")
    assert "".join(piece["content"] for piece in streamed) == "ab"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": []}, "prompt"),
        ("/completion", {"prompt": [5, "a"]}, "prompt"),
        ("/completion", {"prompt": [[5, "a"]]}, "prompt"),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "prompt"),
        ("/completion", {"prompt": "a", "grammar": "yes or no"}, "grammar"),
        ("/completion", {"prompt": "a", "grammar": "root ::= <think>"}, "grammar"),
        ("/completion", {"prompt": "a", "grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
        ("/completion", {"prompt": "a", "json_schema": {"type": "nonsense"}}, "json_schema"),
        ("/completion", {"prompt": "a", "lora": [{"id": 0, "scale": 1}]}, "lora"),
        ("/completion", {"prompt": "a", "post_sampling_probs": True}, "post_sampling_probs"),
        ("/completion", {"prompt": "a", "n_predict": 3, "max_tokens": 4}, "max_tokens"),
        ("/completion", {"prompt": "a", "logit_bias": [[5, True]]}, "logit_bias"),
        ("/completion", {"prompt": "a", "logit_bias": [[10**6, 1]]}, "logit_bias"),
        ("/completion", {"prompt": "a", "n_probs": 99}, "n_probs"),
        ("/completion", {"prompt": "a" * 5000}, "prompt"),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(serve, path, fields, param):
    server = await serve()
    response = await server.post(path, fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not server.engine.submitted


# --- the server ---------------------------------------------------------------------------------------------------


async def test_props_say_what_clients_ask_a_server_for(serve):
    server = await serve(max_model_len=777)
    body = (await server.http.get("/props")).json()
    assert body["default_generation_settings"]["n_ctx"] == 777
    assert body["default_generation_settings"]["params"]["n_predict"] == -1
    assert "<|im_start|>" in body["chat_template"]
    assert (body["total_slots"], body["model_alias"], body["eos_token"]) == (64, "tiny", "<|eos|>")
    assert body["modalities"] == {"vision": False, "audio": False}


async def test_slots_are_the_sequences_that_may_run(serve):
    server = await serve(paused=True)
    assert not any(slot["is_processing"] for slot in (await server.http.get("/slots")).json())
    answer = await server.open_stream("/completion", prompt="Hi", stream=True)
    await server.engine.until(lambda: bool(server.engine.live))
    slots = (await server.http.get("/slots?fail_on_no_slot=1")).json()
    assert (len(slots), sum(slot["is_processing"] for slot in slots)) == (64, 1)
    answer.leave()


async def test_no_slot_is_503_for_who_wants_that(serve):
    server = await serve(paused=True)
    answers = [await server.open_stream("/completion", prompt="Hi", stream=True) for _ in range(64)]
    await server.engine.until(lambda: len(server.engine.live) == 64)
    assert (await server.http.get("/slots?fail_on_no_slot=1")).status_code == 503
    assert (await server.http.get("/slots")).status_code == 200
    assert (await server.http.get("/slots?fail_on_no_slot=x")).status_code == 400
    for answer in answers:
        answer.leave()


async def test_a_key_is_needed(serve):
    server = await serve(api_key=("sk",))
    for path in ("/props", "/slots"):
        assert (await server.http.get(path)).status_code == 401
    assert (await server.post("/completion", {"prompt": "Hi"})).status_code == 401
