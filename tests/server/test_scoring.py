"""Scores over a scripted engine: what is said of a prompt's tokens, echo, and answers that compete."""

from __future__ import annotations

import pytest

from runtime.api import FinishReason, Output
from server.generate import generation
from server.http import answers
from tests.server.conftest import MESSAGES
from tests.server.tiny import EOS, START

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def first_choice(response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


# --- prompt_logprobs ----------------------------------------------------------------------------------------------


async def test_prompt_logprobs_come_token_by_token_as_vllms(serve, tokenizer):
    server = await serve("x")
    a, b = tokenizer.encode("ab")
    choice = first_choice(await server.complete(prompt="ab", prompt_logprobs=1))
    assert choice["prompt_logprobs"] == [
        None,
        {
            str(b): {"logprob": -b / 1000, "rank": 3, "decoded_token": "b"},
            "0": {"logprob": 0.0, "rank": 1, "decoded_token": "<|im_start|>"},
        },
    ]
    assert choice["text"] == "x"
    assert choice["logprobs"] is None
    assert a != b


async def test_of_a_chat_it_stands_beside_the_choices_once(serve):
    server = await serve("x")
    body = (await server.chat(prompt_logprobs=0, n=2)).json()
    prompt = server.engine.submitted[0].prompt_ids
    assert [None if row is None else list(row) for row in body["prompt_logprobs"]] == [
        None,
        *([str(token_id)] for token_id in prompt[1:]),
    ]
    assert not any("prompt_logprobs" in choice for choice in body["choices"])
    assert [request.params.prompt_logprobs for request in server.engine.submitted] == [0, None]


async def test_what_was_written_of_a_prompts_scores_is_let_go_of_in_pieces(serve, monkeypatch):
    server = await serve("x")
    found: list[object] = []
    monkeypatch.setattr(generation, "release", lambda values: found.append(len(values)))
    monkeypatch.setattr(answers, "let_go", lambda body: found.append(len(body.choices[0].prompt_logprobs)))
    assert (await server.complete(prompt="abcd", prompt_logprobs=1)).status_code == 200
    assert found == [3, 4]


async def test_a_prompt_of_one_token_has_nothing_before_it(serve):
    server = await serve("x")
    assert first_choice(await server.complete(prompt="a", prompt_logprobs=2))["prompt_logprobs"] == [None]


async def test_without_the_field_nothing_is_computed_or_shown(serve):
    server = await serve("x")
    assert "prompt_logprobs" not in (await server.complete()).text
    assert server.engine.submitted[0].params.prompt_logprobs is None


async def test_a_prompt_that_was_not_scored_to_the_end_is_no_answer(serve):
    server = await serve("x", paused=True)
    stream = await server.open_stream(COMPLETIONS, prompt="abc", prompt_logprobs=0)
    await server.engine.until(lambda: server.engine.submitted)
    (live,) = server.engine._live
    live.stream.put(Output(0, [], FinishReason.STOP, complete=True))
    assert "500" in (await stream.head()).splitlines()[0]


# --- echo ---------------------------------------------------------------------------------------------------------


async def test_an_echo_puts_the_prompt_before_every_answer(serve):
    server = await serve("yz")
    body = (await server.complete(prompt=["ab", "c"], echo=True, n=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["abyz", "abyz", "cyz", "cyz"]
    assert body["usage"]["completion_tokens"] == 12
    assert server.engine.submitted[0].params.prompt_logprobs is None


async def test_a_prompt_of_ids_is_echoed_as_text_with_its_special_tokens(serve, tokenizer):
    server = await serve("yz")
    choice = first_choice(await server.complete(prompt=[START, *tokenizer.encode("a")], echo=True))
    assert choice["text"] == "<|im_start|>ayz"


async def test_of_a_prompt_that_was_cut_the_rest_is_echoed(serve):
    server = await serve("z")
    choice = first_choice(await server.complete(prompt="abcd", echo=True, truncate_prompt_tokens=2))
    assert choice["text"] == "cdz"


async def test_stop_strings_are_not_looked_for_in_the_echo(serve):
    server = await serve("xb.y")
    choice = first_choice(await server.complete(prompt="a.b", echo=True, stop=["."]))
    assert (choice["text"], choice["stop_reason"]) == ("a.bxb", ".")


async def test_an_echo_has_the_prompts_logprobs_in_openais_lists(serve, tokenizer):
    server = await serve("yz")
    logprobs = first_choice(await server.complete(prompt="ab", echo=True, logprobs=1))["logprobs"]
    ids = tokenizer.encode("abyz")
    top = tokenizer.token_bytes(0).decode()
    assert logprobs == {
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [None, *(-id / 1000 for id in ids[1:])],
        "tokens": ["a", "b", "y", "z"],
        "top_logprobs": [None, *({top: 0.0, letter: -id / 1000} for letter, id in zip("byz", ids[1:], strict=True))],
    }


async def test_a_token_that_completes_a_character_begins_where_it_does(serve, tokenizer):
    assert len(tokenizer.encode("ñ")) == 2
    server = await serve("éz")
    choice = first_choice(await server.complete(prompt="ñab", echo=True, logprobs=0))
    assert choice["text"] == "ñabéz"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 3, 4]


async def test_what_has_no_place_in_the_text_has_no_width(serve, tokenizer):
    server = await serve(script=lambda request: [*tokenizer.encode("y"), START, *tokenizer.encode("z"), EOS])
    prompt = [START, *tokenizer.encode("ab")]
    shown = first_choice(await server.complete(prompt=prompt, echo=True, logprobs=0))
    assert shown["text"] == "<|im_start|>abyz"
    assert shown["logprobs"]["text_offset"] == [0, 12, 13, 14, 15, 15]


async def test_max_tokens_0_scores_a_prompt_and_generates_nothing(serve):
    server = await serve("yz")
    body = (await server.complete(prompt=["abc", "d"], echo=True, logprobs=1, max_tokens=0)).json()
    assert [choice["text"] for choice in body["choices"]] == ["abc", "d"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [3, 1]
    assert body["usage"]["completion_tokens"] == 0
    assert [request.params.max_tokens for request in server.engine.submitted] == [0, 0]


async def test_a_scored_prompt_may_fill_the_context(serve):
    server = await serve("y", max_model_len=16)
    scored = await server.complete(prompt="a" * 16, echo=True, logprobs=0, max_tokens=0)
    assert len(first_choice(scored)["logprobs"]["tokens"]) == 16
    assert (await server.complete(prompt="a" * 17, echo=True, max_tokens=0)).status_code == 400
    assert (await server.complete(prompt="a" * 16, echo=True, max_tokens=1)).status_code == 400


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"max_tokens": 0}, {"prompt": "ñ"}])
async def test_a_stream_with_echo_adds_up_to_the_whole(serve, fields):
    server = await serve("yz")
    body = {"prompt": "abc", "echo": True, "logprobs": 2, **fields}
    whole = (await server.complete(**body)).json()["choices"]
    events = await server.events(COMPLETIONS, **body)
    for expected in whole:
        own = [choice for event in events for choice in event["choices"] if choice["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in own) == expected["text"]
        for name, values in expected["logprobs"].items():
            assert [value for c in own if c["logprobs"] for value in c["logprobs"][name]] == values


async def test_lm_evals_request_gets_what_it_reads(serve, tokenizer):
    """Batches of token ids, one token more than asked about, and the sum over what follows the context."""
    server = await serve("z")
    ids = tokenizer.encode("abcdef")
    body = (
        await server.complete(prompt=[ids, ids[:4]], max_tokens=1, logprobs=1, seed=1234, echo=True, temperature=0)
    ).json()
    for choice, prompt in zip(body["choices"], [ids, ids[:4]], strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][2:-1] == [-id / 1000 for id in prompt[2:]]
        assert [max(top.values()) for top in logprobs["top_logprobs"][2:-1]] == [0.0] * (len(prompt) - 2)


# --- which tokens, and under what name ----------------------------------------------------------------------------


async def test_tokens_asked_for_by_id_stand_in_place_of_the_most_likely(serve, tokenizer):
    server = await serve("ab")
    wanted = tokenizer.encode("yx")
    content = first_choice(await server.chat(logprobs=True, logprob_token_ids=wanted))["logprobs"]["content"]
    assert [[other["token"] for other in token["top_logprobs"]] for token in content] == [["y", "x"]] * 2
    logprobs = first_choice(await server.complete(logprobs=1, logprob_token_ids=wanted))["logprobs"]
    assert [sorted(top) for top in logprobs["top_logprobs"]] == [["a", "x", "y"], ["b", "x", "y"]]


async def test_tokens_may_be_named_by_their_ids(serve, tokenizer):
    server = await serve("ab")
    a, b = tokenizer.encode("ab")
    options = {"return_tokens_as_token_ids": True}
    content = first_choice(await server.chat(logprobs=True, top_logprobs=1, **options))["logprobs"]["content"]
    assert [token["token"] for token in content] == [f"token_id:{a}", f"token_id:{b}"]
    assert content[0]["top_logprobs"][0]["token"] == "token_id:0"
    assert bytes(content[0]["bytes"]) == b"a"
    choice = first_choice(await server.complete(prompt="ab", logprobs=0, echo=True, prompt_logprobs=0, **options))
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in (a, b, a, b)]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["prompt_logprobs"][1][str(b)]["decoded_token"] == f"token_id:{b}"


async def test_of_several_tokens_with_one_text_the_most_likely_counts(serve, tokenizer):
    first, second = tokenizer.encode("ñ")  # each half a character, and written alike
    server = await serve("ñ")
    wanted = sorted([first, second])
    logprobs = first_choice(await server.complete(logprobs=1, logprob_token_ids=wanted))["logprobs"]
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[-float(wanted[0])]] * 2


# --- best_of ------------------------------------------------------------------------------------------------------


async def test_the_likeliest_of_best_of_are_the_answers_and_all_are_paid_for(serve, tokenizer):
    said = ["zz", "ab", "a", "yyy"]  # the fake finds small ids likely

    def script(request):
        return [*tokenizer.encode(said[int(request.id.rsplit("-", 1)[1]) % 4]), EOS]

    server = await serve(script=script)
    body = (await server.complete(prompt=["p", "q"], best_of=4, n=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["a", "ab"] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 24, "total_tokens": 26, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    shown = first_choice(await server.chat(best_of=4, logprobs=True, return_token_ids=True))
    assert [token["token"] for token in shown["logprobs"]["content"]] == ["a"]
    assert shown["token_ids"] == [*tokenizer.encode("a"), EOS]


async def test_every_candidate_has_a_seed_of_its_own(serve):
    server = await serve("ab")
    await server.complete(best_of=3, seed=5)
    assert [request.params.seed for request in server.engine.submitted] == [5, 6, 7]
    assert [request.params.logprobs for request in server.engine.submitted] == [0, 0, 0]


async def test_best_of_as_many_as_n_is_nothing_new_and_may_be_streamed(serve):
    server = await serve("ab")
    events = await server.events(CHAT, messages=MESSAGES, best_of=2, n=2)
    assert len(server.engine.submitted) == 2
    assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1}


# --- the official client ------------------------------------------------------------------------------------------


async def test_the_official_client_echoes_scores_and_chooses(serve):
    server = await serve("yz")
    async with server.openai() as client:
        scored = await client.completions.create(model="tiny", prompt="ab", echo=True, logprobs=1, max_tokens=0)
        assert scored.choices[0].text == "ab"
        assert scored.choices[0].logprobs.token_logprobs[0] is None
        assert len(scored.choices[0].logprobs.tokens) == 2
        best = await client.completions.create(model="tiny", prompt="ab", best_of=3, n=2)
        assert [choice.text for choice in best.choices] == ["yz", "yz"]
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"prompt_logprobs": 1})
        assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
