"""/v1/completions over a scripted engine: what only this route has."""

from __future__ import annotations

import pytest

from tests.server.tiny import EOS, VOCAB_SIZE

COMPLETIONS = "/v1/completions"


async def test_a_whole_answer_has_openais_shape(serve):
    server = await serve("Hello")
    body = (await server.complete(prompt="Say:")).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body.pop("system_fingerprint").startswith("oneloop-")
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None},
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 6,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_chunks_have_no_role_and_end_with_finish_and_usage(serve):
    server = await serve("ab")
    events = await server.events(COMPLETIONS, prompt="x", stream_options={"include_usage": True})
    assert [event["choices"] for event in events] == [
        [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        [{"index": 0, "text": "b", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        [],
    ]
    assert {event["object"] for event in events} == {"text_completion"}
    assert events[-1]["usage"]["total_tokens"] == 4


async def test_sixteen_tokens_are_the_default(serve):
    server = await serve("0123456789abcdefghij")
    choice = (await server.complete()).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("0123456789abcdef", "length")


async def test_the_default_shrinks_to_the_room_there_is(serve):
    server = await serve("0123456789abcdefghij", max_model_len=16)
    choice = (await server.complete(prompt="0123456789")).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("012345", "length")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([70, 71], [[70, 71]]),
        ([[70], [71, 72]], [[70], [71, 72]]),
        ([[70], "c"], None),
        ([70, "c"], None),
        ([70, [71]], None),
    ],
)
async def test_prompts_are_texts_or_ids_one_or_several(serve, tokenizer, prompt, expected):
    server = await serve()
    response = await server.complete(prompt=prompt)
    if expected is None:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        return
    ids = [tokenizer.encode(item) if isinstance(item, str) else item for item in expected]
    assert [list(request.prompt_ids) for request in server.engine.submitted] == ids


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(serve, tokenizer):
    def script(request):
        return [*request.prompt_ids, *tokenizer.encode(str(request.params.seed)), EOS]

    server = await serve(script=script)
    body = (await server.complete(prompt=["ab", "c"], n=2, seed=3)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "ab3"), (1, "ab4"), (2, "c3"), (3, "c4"),
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 3
    events = await server.events(COMPLETIONS, prompt=["ab", "c"], n=2, seed=3)
    texts = dict.fromkeys(range(4), "")
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(texts.values()) == ["ab3", "ab4", "c3", "c4"]


async def test_the_openai_client_reads_both_kinds(serve):
    server = await serve("Hello")
    async with server.openai() as client:
        whole = await client.completions.create(model="tiny", prompt="x")
        chunks = [chunk async for chunk in await client.completions.create(model="tiny", prompt="x", stream=True)]
    assert whole.choices[0].text == "Hello" == "".join(chunk.choices[0].text for chunk in chunks)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [[1], [2**40]]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 129, "n": 2}, "n"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": "a" * 512}, "prompt"),
        ({"prompt": "a" * 500, "max_tokens": 13}, "prompt"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "n": 4}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"prompt": ["a"] * 65, "best_of": 4}, "best_of"),
        ({"min_tokens": 17}, "min_tokens"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_by_name(serve, fields, param):
    server = await serve()
    response = await server.complete(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert server.engine.submitted == []


async def test_a_model_without_a_chat_template_still_completes(serve):
    server = await serve("ok", chat=False)
    assert (await server.complete()).status_code == 200
    refused = await server.chat()
    assert refused.status_code == 400
    assert "chat template" in refused.json()["error"]["message"]
