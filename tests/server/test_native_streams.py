"""Streams are the same whether what is compiled writes them or Python does."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from server.text import native

TEXT = 'Said "so"\n\tand\x01 then: naïve 漢字 😀 \\ '
WAYS = {
    "completion": ("/v1/completions", {"prompt": [[5], [6]], "n": 2}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    "usage": ("/v1/completions", {"prompt": "Hi", "stream_options": {"include_usage": True}}),
    "usage all the time": (
        "/v1/completions",
        {"prompt": "Hi", "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "logprobs": ("/v1/completions", {"prompt": "Hi", "logprobs": 1}),
    "ids": ("/v1/completions", {"prompt": "Hi", "return_token_ids": True}),
    "echo": ("/v1/completions", {"prompt": "Hi", "echo": True}),
    "stop": ("/v1/completions", {"prompt": "Hi", "stop": ["😀"]}),
}


def texts_and_frames(body: str) -> tuple[dict[int, str], set[str], str]:
    """The text of each choice, what surrounds texts, and the last events."""
    body = re.sub(r'"(id|created)":("[^"]*"|\d+)', r'"\1":0', body)
    events = body.split("\n\n")
    texts: dict[int, str] = {}
    frames = set()
    for event in events[:-4]:
        shown = json.loads(event.removeprefix("data: "))
        for choice in shown["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            quoted = json.dumps(text, ensure_ascii=False)
            frames.add(event.replace(f'"text":{quoted}', "").replace(f'"content":{quoted}', "") if text else event)
    return texts, frames, "\n\n".join(events[-4:])


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that are made."""
    if native.module is None:
        pytest.skip("oneloop_text is not built")
    compiled, found = native.module, []

    def make(*args: Any) -> Any:
        found.append(compiled.TokenWriter(*args))
        return found[-1]

    counting = SimpleNamespace(
        BytePieces=compiled.BytePieces, ByteDetokenizer=compiled.ByteDetokenizer, TokenWriter=make
    )
    monkeypatch.setattr(native, "module", counting)
    return found


@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_is_the_same(serve, monkeypatch, writers, way):
    path, fields = WAYS[way]
    found = []
    for module in (native.module, None):
        monkeypatch.setattr(native, "module", module)
        server = await serve(says=TEXT)
        answer = await server.post(
            path, {"stream": True, "max_tokens": 3 * len(TEXT.encode()), "ignore_eos": True, **fields}
        )
        assert answer.status_code == 200, answer.text
        found.append(texts_and_frames(answer.text))
    assert found[0] == found[1]
    assert TEXT.split("😀")[0].rstrip() in found[0][0][0]
    writes = sum(writer.num_written for writer in writers)
    assert (writes > len(TEXT)) == (way in ("completion", "chat", "usage", "echo"))


async def test_a_message_is_the_same(serve, monkeypatch, writers):
    found = []
    for module in (native.module, None):
        monkeypatch.setattr(native, "module", module)
        server = await serve(says=TEXT)
        answer = await server.post(
            "/v1/messages",
            {"stream": True, "max_tokens": 300, "messages": [{"role": "user", "content": "Hi"}], "model": "tiny"},
        )
        assert answer.status_code == 200, answer.text
        events = [json.loads(event.split("\ndata: ")[1]) for event in answer.text.split("\n\n")[:-1]]
        text = "".join(event["delta"].pop("text") for event in events if event["type"] == "content_block_delta")
        for event in events:
            event.get("message", {}).pop("id", None)
        kinds = [event for event, before in zip(events, [None, *events], strict=False) if event != before]
        found.append((text, kinds))
    assert found[0] == found[1]
    assert found[0][0] == TEXT
    assert sum(writer.num_written for writer in writers) > len(TEXT) - 10
