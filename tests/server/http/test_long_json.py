"""Long JSON: the same bytes as in one piece, and no piece that takes long to write or to free."""

from __future__ import annotations

import gc
import weakref

import orjson
import pytest
from msgspec import UNSET, Struct, UnsetType
from msgspec.json import encode

from server.http import answers
from server.http.answers import MAX_DEPTH, NUMBERS, RECORDS, let_go, release, written

TABLE = {"logprob": -1.5, "rank": 1, "decoded_token": '"ü\n'}


def answer(num_tokens: int) -> dict:
    entries = [None, *({str(id): TABLE for id in range(3)} for _ in range(num_tokens - 1))]
    return {"id": "a", "choices": [{"index": 0, "prompt_logprobs": entries, "text": "x"}], "usage": {"a": 1}}


@pytest.mark.parametrize(
    "body",
    [
        5, "x", None, [], {}, [[]], [{}], {"a": []}, answer(1), answer(RECORDS), answer(RECORDS + 1), answer(10 * RECORDS + 7),
        list(range(NUMBERS)), {"tokens": list(range(3 * NUMBERS + 1)), "token_strs": ["ab"] * (NUMBERS + 1)},
        [[{"a": [{"b": [1, 2]}] * (RECORDS + 3)}]], [{"a": 1}] * (2 * RECORDS), [1, {"a": 2}], [{"a": 1}, 2],
    ],
)  # fmt: skip
def test_it_is_what_the_library_writes(body):
    assert written(body) == orjson.dumps(body)


class Inner(Struct):
    text: str
    more: int | UnsetType = UNSET


class Tagged(Struct, tag="tagged"):
    inner: list[Inner]


class Outer(Struct, rename={"from_": "from"}):
    from_: list[Inner]
    one: Tagged
    nothing: None = None
    unset: int | UnsetType = UNSET


def test_declared_types_are_written_as_the_library_writes_them():
    inner = [Inner("a"), Inner("b", 5)]
    body = Outer(inner * RECORDS, Tagged(inner))
    assert written(body) == encode(body)
    let_go(body)
    assert body.from_ == []


def test_no_piece_of_an_answer_has_many_log_probabilities_or_tokens(monkeypatch):
    sizes: list[int] = []

    def noted(value):
        sizes.append(len(value) if isinstance(value, list) else 1)
        return orjson.dumps(value)

    monkeypatch.setattr(answers, "encode", noted)
    written(answer(10 * RECORDS))
    assert max(sizes) == RECORDS
    written({"tokens": [1] * (2 * NUMBERS)})
    assert max(sizes) == NUMBERS
    sizes.clear()
    written({"tokens": [1] * NUMBERS})
    assert sorted(sizes) == [1, NUMBERS]  # the name, and all of them


class Entry(dict):
    """One that can be watched."""


def test_what_was_written_is_let_go_of_piece_by_piece():
    freed: list[int] = []

    class Watched(list):
        def __delitem__(self, index):
            before = len(self)
            super().__delitem__(index)
            freed.append(before - len(self))

    watched = Watched({"a": 1} for _ in range(2 * RECORDS + 5))
    release(watched)
    assert freed == [RECORDS, RECORDS, 5]
    body = {"choices": [{"logprobs": [Entry(a=number) for number in range(3 * RECORDS)], "token_ids": [1, 2, 3]}]}
    entry = weakref.ref(body["choices"][0]["logprobs"][0])
    let_go(body)
    gc.collect()
    assert entry() is None
    assert body == {"choices": [{"logprobs": [], "token_ids": [1, 2, 3]}]}


def test_what_is_short_or_deep_stays():
    body: object = [{"a": 1}] * (2 * RECORDS)
    for _ in range(MAX_DEPTH):
        body = [body]
    let_go([{"a": 1}, body])
    deep = body
    for _ in range(MAX_DEPTH):
        deep = deep[0]  # type: ignore[index]
    assert len(deep) == 2 * RECORDS  # type: ignore[arg-type]
