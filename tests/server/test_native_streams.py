"""Streams are the same whether what is compiled writes them or Python does."""

from __future__ import annotations

import json
import re

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


@pytest.mark.skipif(native.module is None, reason="oneloop_text is not built")
@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_is_the_same(serve, monkeypatch, way):
    path, fields = WAYS[way]
    found = []
    made = native.module.TokenWriter
    count: list[object] = []

    class Module:
        BytePieces, ByteDetokenizer = native.module.BytePieces, native.module.ByteDetokenizer

        @staticmethod
        def TokenWriter(*args):
            count.append(made(*args))
            return count[-1]

    for module in (Module, None):
        monkeypatch.setattr(native, "module", module)
        server = await serve(says=TEXT)
        answer = await server.post(
            path, {"stream": True, "max_tokens": 3 * len(TEXT.encode()), "ignore_eos": True, **fields}
        )
        assert answer.status_code == 200, answer.text
        found.append(texts_and_frames(answer.text))
    assert found[0] == found[1]
    assert TEXT.split("😀")[0].rstrip() in found[0][0][0]
    writes = sum(writer.num_written for writer in count)
    assert (writes > len(TEXT)) == (way in ("completion", "chat", "usage", "echo"))
