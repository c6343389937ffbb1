"""Log-probabilities over a scripted engine: OpenAI's two shapes, streamed and whole, exact to the byte and to the token."""

from __future__ import annotations

import pytest

from tests.server.conftest import MESSAGES
from tests.server.tiny import EOS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def contents(events: list[dict]) -> list[dict]:
    shown = [choice["logprobs"] for event in events for choice in event["choices"]]
    return [token for logprobs in shown if logprobs for token in logprobs["content"]]


async def test_a_chat_lists_its_tokens_with_bytes_and_alternatives(serve, tokenizer):
    server = await serve("añ")
    choice = (await server.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
    ids = tokenizer.encode("añ")
    assert choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    assert [token["logprob"] for token in content] == [-id / 1000 for id in ids]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == "añ" == choice["message"]["content"]
    assert [[other["logprob"] for other in token["top_logprobs"]] for token in content] == [[0.0, -1.0]] * len(ids)
    assert content[0]["token"] == "a"


async def test_half_a_character_has_its_own_bytes(serve, tokenizer):
    assert len(tokenizer.encode("ñ")) == 2
    server = await serve("ñ")
    content = (await server.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[0xC3], [0xB1]]
    assert [token["top_logprobs"] for token in content] == [[], []]


@pytest.mark.parametrize("text", ["Hello there", "añb", "x"])
async def test_a_stream_shows_each_token_once_and_in_order(serve, text):
    server = await serve(text)
    whole = (await server.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
    events = await server.events(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=1)
    assert contents(events) == whole
    assert b"".join(bytes(token["bytes"]) for token in whole).decode() == text


async def test_what_follows_a_stop_string_is_not_shown(serve):
    server = await serve("ab.cd")
    for fields in ({"stop": ["."]}, {"stop": ["b."]}):
        content = (await server.chat(logprobs=True, **fields)).json()["choices"][0]["logprobs"]["content"]
        assert "".join(token["token"] for token in content) == "ab."
        assert contents(await server.events(CHAT, messages=MESSAGES, logprobs=True, **fields)) == content


async def test_the_token_that_ends_an_answer_is_not_part_of_it(serve):
    server = await serve("ab")
    choice = (await server.chat(logprobs=True)).json()["choices"][0]
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["a", "b"]
    assert choice["finish_reason"] == "stop"


async def test_a_reader_who_lags_misses_none(serve):
    server = await serve("abcdef", paused=True)
    stream = await server.open_stream(CHAT, messages=MESSAGES, stream=True, logprobs=True)
    await server.engine.until(lambda: server.engine.submitted)
    for _ in range(7):
        server.engine.step()
    text = ""
    while chunk := await stream.chunk() if text else await _first_chunk(stream):
        text += chunk.decode()
    assert [text.count(f'"token":"{letter}"') for letter in "abcdef"] == [1] * 6


async def _first_chunk(stream) -> bytes:
    await stream.head()
    return await stream.chunk()


async def test_completions_have_four_parallel_lists(serve, tokenizer):
    server = await serve("abc")
    logprobs = (await server.complete(logprobs=1)).json()["choices"][0]["logprobs"]
    ids = tokenizer.encode("abc")
    first = tokenizer.token_bytes(0).decode(errors="replace")
    assert logprobs == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [-id / 1000 for id in ids],
        "tokens": ["a", "b", "c"],
        "top_logprobs": [{first: 0.0, letter: -id / 1000} for letter, id in zip("abc", ids, strict=True)],
    }


async def test_offsets_go_on_through_a_stream(serve):
    server = await serve("abc")
    events = await server.events(COMPLETIONS, prompt="x", logprobs=0)
    shown = [event["choices"][0]["logprobs"] for event in events]
    assert [offset for logprobs in shown if logprobs for offset in logprobs["text_offset"]] == [0, 1, 2]


async def test_each_of_n_answers_has_its_own(serve):
    server = await serve("ab")
    choices = (await server.chat(logprobs=True, n=2)).json()["choices"]
    assert [[token["token"] for token in choice["logprobs"]["content"]] for choice in choices] == [["a", "b"]] * 2


async def test_without_the_field_nothing_is_computed_or_shown(serve):
    server = await serve("ab")
    assert (await server.chat(logprobs=False)).json()["choices"][0]["logprobs"] is None
    assert server.engine.submitted[0].params.logprobs is None
    assert EOS not in server.engine.submitted[0].prompt_ids


async def test_the_official_client_reads_them(serve):
    server = await serve("ab")
    async with server.openai() as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3
        )  # fmt: skip
        tokens = answer.choices[0].logprobs.content
        assert [token.token for token in tokens] == ["a", "b"]
        assert all(len(token.top_logprobs) == 3 for token in tokens)
        text = await client.completions.create(model="tiny", prompt="x", logprobs=2)
        assert text.choices[0].logprobs.tokens == ["a", "b"]
