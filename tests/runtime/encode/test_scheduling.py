"""Encoder work in a scheduler's steps: before the chunk that needs it, within budgets, once; and what a device has of it at any
time. Encoders run beside steps and end when they do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.api import FinishReason, MediaItem, Request, SamplingParams, beside_pictures
from runtime.batch import EncoderWork, ScheduledBatch, ScheduledRow
from runtime.encode.cache import EncoderCache
from runtime.encode.scheduling import EncoderLimits, EncoderScheduling
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.policy.fairness import POLICIES
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.sequence import Sequence
from tests.features import feature_of

TEXT, PICTURE = 7, 9


class Device:
    """What a runner has of encoders' outputs, and complains where a row needs what is not there."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sizes: dict[bytes, int] = {}
        self.encoded: list[bytes] = []  # begun
        self.pending: list[EncoderWork] = []

    def run(self, batch: ScheduledBatch) -> None:
        for key in batch.encoder_drops:
            self.sizes.pop(key, None)
        for work in batch.encoder_work:
            assert work.key not in self.sizes, "encoded twice"
            self.sizes[work.key] = len(work.item.positions)
            self.encoded.append(work.key)
        self.pending += batch.encoder_work
        assert sum(self.sizes.values()) <= self.capacity
        for row in batch.rows:
            for key, first, positions in () if row.media is None else row.media.spans:
                assert first + len(positions) <= self.sizes[key]
                assert key not in {work.key for work in self.pending}
                assert row.start <= positions[0] <= positions[-1] < row.end

    def finish(self, encoding: EncoderScheduling, *, fails: bool = False) -> None:
        """The oldest piece of work ends."""
        work = self.pending.pop(0)
        (encoding.failed if fails else encoding.encoded)(work)


def make(budget=16, *, encoder_tokens=16, cache_size=32, seqs=3, num_blocks=64, caching=False, **rest) -> Scheduler:
    encoding = EncoderScheduling(EncoderLimits(encoder_tokens, cache_size, 256, **rest))
    return Scheduler(
        SchedulerLimits(seqs, budget, frozenset(), in_one_step=encoding.limits.whole_prompts), BlockPool(num_blocks),
        PrefixCache(4, caching), POLICIES["fcfs"](), features=[encoding],
    )  # fmt: skip


def encoding_of(scheduler: Scheduler) -> EncoderScheduling:
    return feature_of(scheduler, EncoderScheduling)


def sequence(number: int, *parts: int | tuple[bytes, int], salt: str | None = None, max_tokens: int = 2) -> Sequence:
    """`parts`: so many tokens of text, or a picture of that digest and so many tokens."""
    ids: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            ids += [TEXT] * part
        else:
            digest, num = part
            media.append(MediaItem("image", digest, np.arange(len(ids), len(ids) + num, dtype=np.int32), {}))
            ids += [PICTURE] * num
    request = Request(str(number), ids, SamplingParams(max_tokens), cache_salt=salt, media=tuple(media))
    return Sequence(request, number=number, max_model_len=256, seed=0)


def steps(scheduler: Scheduler, device: Device, *, most: int = 200) -> list[ScheduledBatch]:
    """All that follow with rows, each settled before the next, and what it had encoded there."""
    found = []
    while (batch := scheduler.schedule()) is not None:
        assert len(found) < most, "it does not come to an end"
        device.run(batch)
        while device.pending:
            device.finish(encoding_of(scheduler))
        scheduler.settle(batch, [[TEXT]] * len(batch.sampling_rows))
        found.append(batch)
    assert not scheduler.waiting
    assert not scheduler.running
    return found


def spans(batch: ScheduledBatch) -> list[tuple[int, int]]:
    return [(row.start, row.end) for row in batch.rows]


def test_a_picture_is_encoded_before_the_chunk_that_reaches_it_and_not_again():
    scheduler, device = make(budget=8), Device(32)
    scheduler.add(sequence(1, 8, (b"a", 6), 6))
    first, second, third, fourth, *_ = steps(scheduler, device)
    assert [len(batch.encoder_work) for batch in (first, second, third, fourth)] == [0, 1, 0, 0]
    assert [spans(batch) for batch in (second, third, fourth)] == [[], [(8, 16)], [(16, 20)]]
    assert second.encoder_work[0].number == 1


def test_a_chunk_ends_within_a_picture_and_the_next_goes_on_with_the_rest_of_it():
    scheduler, device = make(budget=5, seqs=2), Device(32)
    scheduler.add(sequence(1, 3, (b"a", 6), 3))
    text, first, second, *_ = steps(scheduler, device)
    assert (spans(text), len(text.encoder_work)) == ([(0, 3)], 1)
    (one,), (other,) = (batch.rows[0].media.spans for batch in (first, second))
    assert (one.first, one.positions.tolist()) == (0, [3, 4, 5, 6, 7])
    assert (other.first, other.positions.tolist()) == (5, [8])
    assert device.encoded == [b"a"]


def test_what_does_not_fit_the_steps_budget_is_where_the_chunk_ends():
    scheduler, device = make(budget=64, encoder_tokens=8), Device(32)
    scheduler.add(sequence(1, 2, (b"a", 6), 2, (b"b", 6), 2))
    found = steps(scheduler, device)
    assert [[work.key for work in batch.encoder_work] for batch in found[:3]] == [[b"a"], [b"b"], []]
    assert [spans(batch) for batch in found[:3]] == [[(0, 2)], [(2, 10)], [(10, 18)]]


def test_one_that_is_larger_than_the_budget_is_encoded_alone():
    scheduler, device = make(budget=64, encoder_tokens=4), Device(32)
    scheduler.add(sequence(1, (b"a", 6), (b"b", 6)))
    first, second, *_ = steps(scheduler, device)
    assert [work.key for work in (*first.encoder_work, *second.encoder_work)] == [b"a", b"b"]


def test_a_cache_that_holds_one_makes_others_wait_for_their_turn():
    scheduler, device = make(budget=64, encoder_tokens=64, cache_size=6), Device(6)
    for number, key in enumerate((b"a", b"b", b"c")):
        scheduler.add(sequence(number, 2, (key, 6), 2))
    steps(scheduler, device)
    assert device.encoded == [b"a", b"b", b"c"]


def test_two_that_come_together_share_one_picture_unless_their_salts_differ():
    scheduler, device = make(budget=64), Device(32)
    scheduler.add(sequence(1, 2, (b"a", 6)))
    scheduler.add(sequence(2, 4, (b"a", 6), salt="other"))
    scheduler.add(sequence(3, 1, (b"a", 6)))
    steps(scheduler, device)
    assert len(device.encoded) == 2


def test_what_the_prefix_cache_has_of_a_picture_needs_no_encoder():
    scheduler, device = make(budget=64, caching=True), Device(32)
    scheduler.add(sequence(1, 2, (b"a", 6), 9))
    steps(scheduler, device)
    encoding_of(scheduler).clear()
    scheduler.add(sequence(2, 2, (b"a", 6), 5))
    (first, *_) = steps(scheduler, device)
    assert spans(first) == [(12, 13)]
    assert device.encoded == [b"a"]


def test_items_that_may_not_be_cut_are_in_one_step_even_beyond_its_budget_for_prompts():
    scheduler, device = make(budget=16, whole_items=True), Device(32)
    scheduler.step_policy.budget = type("Two", (), {"has_turns": False, "prompt_tokens": lambda *_: 2,
                                             "ending_cost": 0})()  # fmt: skip
    scheduler.add(sequence(1, 2, max_tokens=9))
    scheduler.add(sequence(2, 3, (b"a", 10), 1))
    found = steps(scheduler, device)
    holding = [row for batch in found for row in batch.rows if row.media is not None and row.media.spans]
    assert [(row.start <= 3, row.end >= 13) for row in holding] == [(True, True)]


def test_others_go_on_while_a_picture_is_encoded():
    scheduler, device = make(budget=64), Device(32)
    scheduler.add(sequence(1, 2, max_tokens=9))
    scheduler.add(sequence(2, 1, (b"a", 3), 2))
    scheduler.add(sequence(3, 1, (b"a", 3), 1))
    seen = []
    for number in range(4):
        device.run(batch := scheduler.schedule())
        scheduler.settle(batch, [[TEXT]] * len(batch.sampling_rows))
        seen.append([(row.number, row.start, row.end) for row in batch.rows])
        if number == 2:
            device.finish(encoding_of(scheduler))
    assert seen[0] == [(1, 0, 2), (2, 0, 1), (3, 0, 1)]
    assert seen[1:3] == [[(1, 2, 3)], [(1, 3, 4)]]
    assert seen[3] == [(1, 4, 5), (2, 1, 6), (3, 1, 5)]
    assert device.encoded == [b"a"]
    assert (encoding_of(scheduler).stats.num_queries, encoding_of(scheduler).stats.num_hits) == (2, 1)


def test_nothing_is_launched_while_all_wait_for_a_picture():
    scheduler, device = make(budget=64), Device(32)
    scheduler.add(sequence(1, (b"a", 3), 2))
    device.run(batch := scheduler.schedule())
    assert (batch.rows, len(batch.encoder_work)) == ((), 1)
    assert scheduler.schedule() is None
    assert encoding_of(scheduler).slows_steps
    device.finish(encoding_of(scheduler))
    assert [spans(each) for each in steps(scheduler, device)[:1]] == [[(0, 5)]]


def test_whose_picture_failed_for_another_tries_for_itself():
    scheduler, device = make(budget=64), Device(32)
    first, second = (sequence(number, (b"a", 3), 2) for number in (1, 2))
    scheduler.add(first)
    scheduler.add(second)
    device.run(scheduler.schedule())
    device.finish(encoding_of(scheduler), fails=True)
    scheduler.finish(first, FinishReason.ERROR)
    again = scheduler.schedule()
    assert [work.number for work in again.encoder_work] == [2]
    device.run(again)
    device.finish(encoding_of(scheduler))
    steps(scheduler, device)
    assert device.encoded == [b"a", b"a"]


def test_what_was_encoded_for_nobody_is_not_taken_for_what_comes_later():
    scheduler, device = make(budget=64, cache_size=6), Device(6)
    gone = sequence(1, (b"a", 6), 2)
    scheduler.add(gone)
    device.run(scheduler.schedule())
    (old,) = device.pending
    scheduler.finish(gone, FinishReason.ABORT)
    scheduler.add(sequence(2, (b"b", 6), 2))
    device.pending.clear()
    device.run(scheduler.schedule())
    assert not encoding_of(scheduler).encoded(old)
    assert not encoding_of(scheduler).failed(old)
    assert scheduler.schedule() is None
    device.finish(encoding_of(scheduler))
    assert scheduler.schedule() is not None


def test_of_items_that_take_turns_a_chunk_ends_before_the_first_that_is_missing():
    """A prompt may go on in the middle of both: behind a prefix that was found."""
    seen, heard = ([2, 3, 6, 7], [4, 5, 8, 9])
    media = tuple(
        MediaItem(modality, modality.encode(), np.array(places, np.int32), {})
        for modality, places in (("video", seen), ("audio", heard))
    )
    one = Sequence(Request("1", [TEXT] * 12, SamplingParams(2), media=media), number=1, max_model_len=256, seed=0)
    encoding = encoding_of(make())
    assert encoding.reach(one, 12, 16) == 2
    encoding = encoding_of(make())
    one.num_computed_tokens = 4
    assert encoding.reach(one, 8, 16) == 0
    for work in encoding.complete(ScheduledBatch((), 0, 0)).encoder_work:
        encoding.encoded(work)
    assert encoding.reach(one, 8, 16) == 8


def test_what_no_step_could_hold_is_refused():
    whole = make(budget=8, cache_size=10, whole_items=True).features[0]
    large, wide = (sequence(1, (b"a", num)).request for num in (11, 8))
    with pytest.raises(ValueError, match=r"11 tokens, more than --encoder-cache-size 10"):
        whole.check(large)
    with pytest.raises(ValueError, match=r"8 tokens, and a step holds 8 \(--max-num-batched-tokens\)"):
        whole.check(wide)
    encoding_of(make(budget=8, cache_size=10)).check(wide)
    sounds = replace(large, media=(*large.media, MediaItem("audio", b"s", np.array([20], np.int32), {})))
    with pytest.raises(ValueError, match="encodes audio differently when images are present"):
        encoding_of(make(budget=32, apart=True)).check(sounds)
    encoding_of(make(budget=32, apart=True)).check(replace(sounds, media=beside_pictures(sounds.media)))
    encoding_of(make(budget=32, apart=True)).check(replace(sounds, media=sounds.media[1:]))
    encoding_of(make(budget=32)).check(sounds)
    several = sequence(1, (b"a", 6), (b"b", 6), (b"a", 6)).request
    encoding_of(make(budget=32, cache_size=12, whole_prompts=True)).check(several)
    with pytest.raises(ValueError, match=r"items have 12 tokens, more than --encoder-cache-size 11"):
        encoding_of(make(budget=32, cache_size=11, whole_prompts=True)).check(several)


def test_a_step_that_failed_takes_nothing_of_what_is_encoded_beside_it():
    scheduler, device = make(budget=64), Device(32)
    scheduler.add(sequence(1, 2, (b"a", 6), 2))
    device.run(failed := scheduler.schedule())
    assert len(failed.encoder_work) == 1
    scheduler.forget_step([failed])
    device.finish(encoding_of(scheduler))
    steps(scheduler, device)
    assert device.encoded == [b"a"]


def test_the_least_recently_used_goes_first_and_what_is_held_never():
    cache = EncoderCache(10)
    for key in (b"a", b"b"):
        assert cache.add(key, 4)
        cache.hold(key, (1, 0))
    assert not cache.add(b"c", 4)
    cache.release(b"a", (1, 0))
    cache.release(b"b", (1, 0))
    cache.hold(b"a", (2, 0))
    cache.release(b"a", (2, 0))
    assert cache.add(b"c", 4)
    assert (b"a" in cache, b"b" in cache, cache.take_dropped(), cache.num_used) == (True, False, (b"b",), 8)


parts = st.lists(
    st.one_of(st.integers(1, 9), st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.just(6))),
    min_size=1,
    max_size=6,
)


@given(prompts=st.lists(parts, min_size=1, max_size=6), data=st.data())
def test_whatever_comes_every_row_finds_what_it_needs_and_all_come_to_an_end(prompts, data):
    whole = data.draw(st.booleans())
    scheduler = make(
        data.draw(st.integers(8, 24)), encoder_tokens=data.draw(st.integers(1, 16)), cache_size=data.draw(st.integers(6, 20)),
        seqs=4, num_blocks=data.draw(st.integers(20, 40)), caching=data.draw(st.booleans()), whole_items=whole,
    )  # fmt: skip
    for row, request in rows_of(scheduler, prompts, data):
        for item in request.media:
            assert not (whole and row.start <= item.positions[0] < row.end <= item.positions[-1])


@given(prompts=st.lists(parts, min_size=1, max_size=6), data=st.data())
def test_prompts_whose_tokens_see_each_other_are_computed_at_once_and_all_come_to_an_end(prompts, data):
    """However little room there is: as much as one of them needs."""
    scheduler = make(
        64, encoder_tokens=data.draw(st.integers(1, 16)), cache_size=data.draw(st.integers(24, 32)), seqs=4,
        num_blocks=data.draw(st.integers(20, 40)), whole_prompts=True,
    )  # fmt: skip
    for row, request in rows_of(scheduler, prompts, data):
        num = len(request.prompt_ids)
        assert (row.start == 0 and row.end >= num and row.media.prompt_len == num) or (
            row.start >= num and row.media is None
        )


def rows_of(scheduler: Scheduler, prompts, data) -> Iterator[tuple[ScheduledRow, Request]]:
    """All rows of steps with whatever happens between them, until all have ended."""
    device = Device(encoding_of(scheduler).cache.capacity)
    sequences = [sequence(number, *each) for number, each in enumerate(prompts)]
    for each in sequences:
        scheduler.add(each)
    for number in range(400):
        event = data.draw(st.integers(0, 12)) if number < 40 else None  # then nothing keeps them from their end
        if event == 0 and scheduler.running:
            scheduler.sequences.preempt(scheduler.running[-1])
        elif event == 1 and scheduler.running:
            scheduler.finish(scheduler.running[0], FinishReason.ABORT)
        batch = scheduler.schedule()
        if batch is None:
            if not device.pending:
                break
            device.finish(encoding_of(scheduler))
            continue
        device.run(batch)
        for _ in range(data.draw(st.integers(0, len(device.pending)))):
            device.finish(encoding_of(scheduler), fails=event == 3)
        if event == 2:
            scheduler.forget_step([batch])
            continue
        for row in batch.rows:
            own = sequences[row.number].request
            wanted = sorted(p for item in own.media for p in item.positions.tolist() if row.start <= p < row.end)
            given_to = [] if row.media is None else [p for span in row.media.spans for p in span.positions.tolist()]
            assert given_to == wanted
            yield row, own
        scheduler.settle(batch, [[TEXT]] * len(batch.sampling_rows))
    assert not scheduler.running
    assert not scheduler.waiting
    assert not encoding_of(scheduler).cache._holders


@pytest.mark.parametrize("num_text", [1, 5, 16, 17])
def test_the_last_token_of_a_prompt_waits_for_its_picture_though_it_is_alone_like_a_decode(num_text):
    scheduler, device = make(), Device(32)
    scheduler.add(sequence(1, num_text, (b"a", 1)))
    scheduler.add(sequence(2, 3))
    for _ in range(4):  # the picture is not there yet: others go on
        if (batch := scheduler.schedule()) is not None:
            device.run(batch)
            scheduler.settle(batch, [[5] for _ in batch.sampling_rows])
    assert scheduler.sequences.find(1).num_computed_tokens == num_text
    assert scheduler.sequences.find(2) is None
    device.finish(encoding_of(scheduler))
    batch = scheduler.schedule()
    device.run(batch)
    assert [(row.number, row.start, len(row.media.spans)) for row in batch.rows] == [(1, num_text, 1)]
