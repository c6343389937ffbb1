"""The store: bounded, honest about what is gone, and nobody else's."""

from __future__ import annotations

import pytest

from server.api.response_store import ENTRY_BYTES, ITEM_BYTES, Caller, Entry, ResponseStore, StoredItem
from server.http.errors import PreviousResponseNotFound, ResponseNotFound

ANY = Caller()
ITEM = StoredItem("msg_1", b"x" * 100)
SIZE = ENTRY_BYTES + ITEM_BYTES + 100


class Making:
    """A response that is being made."""

    is_over = False
    status = "in_progress"
    body = b"{}"

    async def news(self) -> None:
        raise AssertionError("nobody waits")

    async def cancel(self) -> None:
        raise AssertionError("nobody cancels")


def entry(id: str, previous: Entry | None = None, *, owner: bytes | None = None) -> Entry:
    return Entry(id, owner, (StoredItem(f"msg_{id}", ITEM.json),), previous)


def store_of(*entries: Entry, max_responses: int = 100, max_bytes: int = 10**6) -> ResponseStore:
    store = ResponseStore(max_responses, max_bytes)
    for one in entries:
        store.add(one)
    return store


def why(store: ResponseStore, id: str, caller: Caller = ANY) -> str:
    with pytest.raises(ResponseNotFound) as caught:
        store.get(id, caller)
    return caught.value.message


def test_the_oldest_go_when_there_are_too_many():
    store = store_of(*(entry(str(number)) for number in range(5)), max_responses=3)
    assert len(store) == 3
    assert store.get("4", ANY).id == "4"
    assert "evicted to make room" in why(store, "1")
    assert "at most 3 responses" in why(store, "1")


def test_the_oldest_go_when_they_are_too_large():
    store = store_of(*(entry(str(number)) for number in range(5)), max_bytes=2 * SIZE)
    assert len(store) == 2
    assert store.num_bytes == 2 * SIZE
    assert "evicted" in why(store, "2")


def test_a_conversation_is_counted_once_however_many_responses_it_has():
    first = entry("1")
    second = entry("2", first)
    third = entry("3", second)
    store = store_of(first, second, third)
    assert store.num_bytes == 3 * SIZE
    assert [item.id for item in third.conversation()] == ["msg_1", "msg_2", "msg_3"]


def test_what_others_continue_stays_and_is_counted_until_they_go():
    first = entry("1")
    second = entry("2", first)
    store = store_of(first, second, entry("3"), max_responses=2)
    assert "evicted" in why(store, "1")
    assert store.num_bytes == 3 * SIZE
    assert [item.id for item in second.conversation()] == ["msg_1", "msg_2"]
    store.add(entry("4"))
    assert "evicted" in why(store, "2")
    assert store.num_bytes == 2 * SIZE


def test_what_went_while_it_was_being_continued_is_counted_again():
    first = entry("1")
    second = entry("2", first)
    store = store_of(first, second)
    third = entry("3", second)  # is being made
    store.delete(second)
    store.delete(first)
    assert store.num_bytes == 0
    store.add(third)
    assert store.num_bytes == 3 * SIZE
    store.delete(third)
    assert store.num_bytes == 0
    other = store_of(one := entry("1"), two := entry("2", one))
    other.delete(two)
    other.add(three := entry("3", two))
    other.delete(three)
    assert other.num_bytes == SIZE


def test_a_conversation_too_long_for_the_store_is_not_kept():
    first = entry("1")
    second = entry("2", first)
    store = store_of(first, second, max_bytes=SIZE + 1)
    assert (len(store), store.num_bytes) == (0, 0)
    assert "evicted" in why(store, "2")


def test_what_is_being_made_is_not_evicted():
    making = entry("1")
    making.ongoing = Making()
    store = store_of(making, entry("2"), entry("3"), max_responses=1)
    assert [store.get("1", ANY), len(store)] == [making, 1]
    making.body = b"y" * 50
    store.finish(making)
    assert store.num_bytes == SIZE + 50
    store.add(entry("4"))
    assert "evicted" in why(store, "1")


def test_what_was_deleted_while_it_was_made_is_not_counted_when_it_ends():
    making = entry("1")
    making.ongoing = Making()
    store = store_of(making)
    store.delete(making)
    store.finish(making)
    assert store.num_bytes == 0
    assert "was deleted" in why(store, "1")


def test_nobody_learns_of_what_belongs_to_another_key():
    mine, other, admin = Caller(b"mine"), Caller(b"other"), Caller(None, is_admin=True)
    store = store_of(entry("1", owner=b"mine"), entry("2", owner=b"mine"), max_responses=1)
    assert store.get("2", mine) is store.get("2", admin)
    assert "evicted" in why(store, "1", mine)
    assert "evicted" in why(store, "1", admin)
    for caller in (other, ANY):
        unknown = why(store, "3", caller).replace("'3'", "")
        assert why(store, "1", caller).replace("'1'", "") == why(store, "2", caller).replace("'2'", "") == unknown
        assert store.items({"msg_2"}, caller) == {}
    assert store.items({"msg_2", "msg_9"}, mine) == {"msg_2": StoredItem("msg_2", ITEM.json)}


def test_a_store_of_nothing_says_so():
    store = store_of(max_responses=0)
    assert not store.keeps
    assert "--max-stored-responses 0" in why(store, "1")


def test_a_previous_response_is_missed_under_the_field_that_names_it():
    with pytest.raises(PreviousResponseNotFound) as caught:
        store_of().get_previous("resp_1", ANY)
    assert (caught.value.status, caught.value.param) == (404, "previous_response_id")
