"""Both writers of tokens write the same text, the same JSON around it and the same chunks."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text import native
from server.text.detokenize import TokenTable
from tests.server.text.made_tokenizers import MADE, made

BEFORE, AFTER = b'data: {"text":"', b'"}\n\n'


@pytest.fixture(autouse=True, scope="module", params=["compiled", "python"])
def _kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """The compiled writer, and the one of installations without a compiler."""
    if request.param == "compiled" and native.module is None:
        pytest.skip("oneloop_text is not built")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(native, "module", None)
        yield


class Connection:
    """`is_free`: whether it takes a chunk at once."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.is_free = True

    @property
    def chunk_writer(self):
        return self.chunks.append if self.is_free else None


class Texts:
    """A Detokenizer whose ids are places of `texts`."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def feed(self, ids):
        return "".join(self._texts[id] for id in ids)


def writer_of(detokenizer, connection):
    return native.token_writer(detokenizer, BEFORE[:-1], AFTER[1:], connection)


def write(writer, *ids):
    return writer.write_all([(writer, list(ids))])


def chunk(text: str) -> bytes:
    body = BEFORE + orjson.dumps(text)[1:-1] + AFTER
    return b"%x\r\n%b\r\n" % (len(body), body)


@pytest.mark.parametrize("first", range(0, 0x110000, 0x8000))
def test_every_character_is_written_as_orjson_does(first):
    text = "".join(chr(code) for code in range(first, first + 0x8000) if not 0xD800 <= code < 0xE000)
    connection = Connection()
    write(writer_of(Texts(text), connection), 0)
    assert connection.chunks == ([chunk(text)] if text else [])


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_texts_become_the_chunks_that_python_makes_of_them_and_nothing_becomes_none(texts):
    connection = Connection()
    writer = writer_of(Texts(*texts), connection)
    for place in range(len(texts)):
        assert write(writer, place) == []
    assert connection.chunks == [chunk(text) for text in texts if text]
    assert (writer.num_written, writer.take_num_tokens(), writer.take_num_tokens()) == (
        len(connection.chunks), len(texts), 0,
    )  # fmt: skip


@pytest.mark.parametrize("name", MADE)
@given(numbers=st.lists(st.integers(0, 10**6), max_size=40))
def test_ids_become_what_the_detokenizer_gives_of_them(name, numbers):
    tokenizer, connection = made(name), Connection()
    table = TokenTable(tokenizer)
    ids = [number % (tokenizer.get_vocab_size() + 64) for number in numbers]
    detokenizer = table.detokenizer()
    writer = writer_of(detokenizer, connection)
    for id in ids:
        assert write(writer, id) == []
    shown = "".join(json.loads(each.split(b"data: ")[1][:-2])["text"] for each in connection.chunks)
    assert shown + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=True)


def test_where_a_connection_is_not_free_nothing_happens_until_the_writer_is_opened_again():
    table, connection = TokenTable(made("byte level")), Connection()
    detokenizer, other = table.detokenizer(), Connection()
    writer = writer_of(detokenizer, connection)
    others = writer_of(table.detokenizer(), other)
    ids = made("byte level").encode("漢").ids
    assert len(ids) > 1
    write(writer, ids[0])
    connection.is_free = False
    work = [(writer, ids[1:], "mine"), (others, ids, "its")]
    assert writer.write_all(work) == [(work[0], None)]
    connection.is_free = True
    assert writer.write_all(work[:1]) == [(work[0], None)], "what is behind it must not come first"
    writer.is_open = True
    assert writer.write_all(work[:1]) == []
    assert connection.chunks == other.chunks == [chunk("漢")]


def test_a_writer_that_its_connection_knows_is_collected_with_it():
    connection = Connection()
    connection.writer = writer_of(TokenTable(made("byte level")).detokenizer(), connection)
    write(connection.writer, 40)
    left = weakref.ref(connection)
    del connection
    gc.collect()
    assert left() is None


def test_what_one_writer_raises_is_told_and_the_others_write():
    connection = Connection()
    broken, fine = writer_of(Texts(), connection), writer_of(Texts("fine"), connection)
    (((writer, ids), error),) = fine.write_all([(broken, [0]), (fine, [0])])
    assert (writer, ids, type(error)) == (broken, [0], IndexError)
    assert connection.chunks == [chunk("fine")]
    ((_, error),) = fine.write_all([(writer_of(TokenTable(made("byte level")).detokenizer(), connection), ["a"])])
    assert isinstance(error, TypeError)


@pytest.mark.skipif(native.module is None, reason="oneloop_text is not built")
@pytest.mark.parametrize("work", [["writer", [0]], [None, (0,)], [None]])
def test_the_compiled_writer_refuses_what_is_no_work(work):
    import oneloop_text

    fine = oneloop_text.TokenWriter(Texts("fine"), BEFORE, AFTER, Connection())
    with pytest.raises((TypeError, RuntimeError)):
        fine.write_all([(work[0] or fine, *work[1:])])
