"""What a request may ask about its prompt and its tokens: truncation, documents, token ids, usage as it grows."""

from __future__ import annotations

import asyncio
import threading

import pytest

from server.generate import plain_prompts
from server.generate.generation import Generation
from server.models.prompt import ChatTemplate
from tests.server.conftest import MESSAGES
from tests.server.test_refusals import error_of
from tests.server.tiny import EOS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"truncate_prompt_tokens": 3}, "fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 8}, "abcdefgh"),
        ({"truncate_prompt_tokens": 15}, "abcdefgh"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 12}, "efgh"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1}, "abcdefgh"),
    ],
)
async def test_a_prompt_may_be_cut_at_either_end(serve, tokenizer, fields, left):
    server = await serve("x", max_model_len=16)
    response = await server.complete(**{"prompt": "abcdefgh", "max_tokens": 1, **fields})
    assert response.status_code == 200, response.text
    assert tokenizer.decode(server.engine.submitted[0].prompt_ids) == left
    assert response.json()["usage"]["prompt_tokens"] == len(left)


async def test_a_text_far_beyond_the_context_is_cut_not_refused(serve):
    server = await serve("x", max_model_len=64)
    long = "word " * 5000
    assert (await server.complete(prompt=long)).status_code == 400
    assert (await server.complete(prompt=long, truncate_prompt_tokens=10)).json()["usage"]["prompt_tokens"] == 10
    chat = {"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": 10}
    assert (await server.chat(**chat)).json()["usage"]["prompt_tokens"] == 10


async def test_documents_reach_the_template(serve, tokenizer):
    server = await serve()
    template = ChatTemplate("{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{{ messages[0].content }}", {})
    object.__setattr__(server.service.lifecycle.require_model(), "chat_template", template)
    await server.chat(documents=[{"title": "one"}, {"title": "two"}])
    assert tokenizer.decode(server.engine.submitted[0].prompt_ids) == "[one][two]Hi"


async def test_what_no_template_looks_at_is_named_as_ignored_or_refused(serve):
    unread = {"documents": [{"title": "one"}], "chat_template_kwargs": {"assistant": "bot", "enable_thinking": False}}
    response = await (await serve()).chat(**unread)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "documents, chat_template_kwargs.enable_thinking"
    strict = await serve(strict_fields=True)
    assert error_of(await strict.chat(**unread), 400, "unsupported_parameter")["param"] == "documents"
    assert (await strict.chat(documents=[], chat_template_kwargs={"assistant": "bot"})).status_code == 200


async def test_token_ids_beside_the_text_and_the_end_is_among_them(serve, tokenizer):
    server = await serve("ab")
    ids = [*tokenizer.encode("ab"), EOS]
    for ask in (server.chat, server.complete):
        (choice,) = (await ask(return_token_ids=True)).json()["choices"]
        assert choice["token_ids"] == ids
        assert choice["prompt_token_ids"] == list(server.engine.submitted[-1].prompt_ids)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_streams_token_ids_add_up_and_the_prompts_come_once(serve, tokenizer, path):
    server = await serve("añb")
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    events = await server.events(path, return_token_ids=True, **prompt)
    choices = [choice for event in events for choice in event["choices"]]
    assert [id for choice in choices for id in choice.get("token_ids", ())] == [*tokenizer.encode("añb"), EOS]
    assert ["prompt_token_ids" in choice for choice in choices] == [True] + [False] * (len(choices) - 1)


async def test_a_stop_string_ends_the_ids_too(serve, tokenizer):
    server = await serve("ab.cd")
    (choice,) = (await server.complete(return_token_ids=True, stop=["."])).json()["choices"]
    assert choice["token_ids"] == tokenizer.encode("ab.")


async def test_usage_grows_from_chunk_to_chunk_if_asked(serve):
    server = await serve("ab")
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await server.events(CHAT, messages=MESSAGES, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 1, 2, 3, 3]
    assert "".join(c["delta"].get("content", "") for event in events for c in event["choices"]) == "ab"


async def test_without_the_field_no_answer_has_ids(serve):
    server = await serve("ab")
    assert "token_ids" not in (await server.chat()).text
    assert not any("token_ids" in str(event) for event in await server.events(CHAT, messages=MESSAGES))


async def test_allowed_tokens_reach_the_sampler(serve):
    server = await serve("ab")
    await server.chat(allowed_token_ids=[3, 5, 3])
    assert server.engine.submitted[0].params.allowed_token_ids == frozenset({3, 5})


async def test_long_prompts_are_prepared_off_the_loop_once_for_all_their_choices(serve):
    server = await serve("x", max_model_len=20_000)
    long = "word " * 1000
    assert (await server.complete(prompt=[long, "short", long], n=2, max_tokens=1)).status_code == 200
    assert (await server.chat(messages=[{"role": "user", "content": long}], max_tokens=1)).status_code == 200
    assert len(server.engine.prepared_on) == 3 + 1
    assert threading.current_thread() not in server.engine.prepared_on
    first, second, *short, third, fourth = [request.prepared for request in server.engine.submitted[:6]]
    assert short[0] is short[1] is not None  # which is submitted with long ones
    assert first is second is not None
    assert third is fourth is not first
    assert server.engine.submitted[6].prepared is not None


async def test_prompts_that_are_long_together_are_prepared_off_the_loop_and_come_in_their_order(serve, monkeypatch):
    monkeypatch.setattr(plain_prompts, "PIECE_TOKENS", 1000)
    server = await serve("ok", max_queue=256, max_model_len=4096)
    await server.complete(prompt=[[5] * 100] * 20)  # 2,000 tokens
    assert not server.engine.prepared_on
    prompts = [[number] * 100 for number in range(21)]
    await server.complete(prompt=prompts)
    assert len(server.engine.prepared_on) == 21
    assert threading.current_thread() not in server.engine.prepared_on
    assert [request.prompt_ids for request in server.engine.submitted[-21:]] == prompts


async def test_requests_are_made_and_handed_to_the_engine_in_turns_of_their_own(serve, monkeypatch):
    server = await serve("ok", max_queue=256)
    turns: list[str] = []
    made, submit = Generation.__init__, type(server.engine).submit

    def noting(name, call):
        def noted(*args, **more):
            turns.append(name)
            asyncio.get_running_loop().call_soon(turns.append, "turn")
            return call(*args, **more)

        return noted

    monkeypatch.setattr(Generation, "__init__", noting("made", made))
    monkeypatch.setattr(type(server.engine), "submit", noting("submitted", submit))
    await server.complete(prompt="ab", n=33, temperature=1)
    assert turns[:3] == ["made", "turn", "submitted"]


async def test_beams_of_a_long_prompt_have_it_prepared_once(serve):
    server = await serve("xyz", max_model_len=20_000)
    beams = {"use_beam_search": True, "n": 2, "max_tokens": 3}
    assert (await server.complete(prompt="word " * 1000, **beams)).status_code == 200
    assert len(server.engine.prepared_on) == 1
    hashes = {id(request.prepared.block_hashes) for request in server.engine.submitted}
    assert len(server.engine.submitted) > 2
    assert len(hashes) == 1
