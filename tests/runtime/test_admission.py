"""Admission: what is taken, what is refused, and when to ask again, by a clock in the test's hand."""

from __future__ import annotations

import pytest

from runtime.api import Busy, CallerLimit, QueueFull, Request, SamplingParams
from runtime.engine.admission import MAX_BUCKETS, MAX_RETRY_S, Admission, AdmissionLimits, StartRate
from runtime.sequence import Sequence


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def requests(caller=b"a", times=1, prompt=10) -> list[Request]:
    ids = [5] * prompt
    return [Request("r", ids, SamplingParams(4), caller=caller) for _ in range(times)]


def waiting(caller=b"a", times=1, prompt=10) -> list[Sequence]:
    return [
        Sequence(request, number=0, max_model_len=100, seed=0)
        for _ in range(times)
        for request in requests(caller, 1, prompt)
    ]


def refusal(admission: Admission, *args, rows=0) -> Busy | None:
    try:
        admission.check(*args, rows)
    except Busy as busy:
        return busy
    return None


def test_a_full_queue_is_full_for_who_filled_it_and_open_for_others_up_to_their_part(clock):
    admission = Admission(AdmissionLimits(max_queue=8), clock)
    queue = waiting(b"a", 8)
    assert isinstance(refusal(admission, requests(b"a"), queue), QueueFull)
    assert refusal(admission, requests(b"a"), queue, rows=1) is None  # which one of them will have at once
    taken = 0
    while refusal(admission, requests(b"b"), queue) is None:
        queue += waiting(b"b")
        taken += 1
    assert taken == 4  # half of what two have
    while refusal(admission, requests(b"c"), queue) is None:
        queue += waiting(b"c")
    assert len(queue) == 8 + 4 + 2


def test_however_many_callers_come_the_queue_has_an_end(clock):
    admission = Admission(AdmissionLimits(max_queue=8), clock)
    queue = waiting(b"a", 8)
    for number in range(1000):
        caller = str(number).encode()
        if refusal(admission, requests(caller), queue) is None:
            queue += waiting(caller)
    assert len(queue) == 16


def test_prompts_wait_up_to_so_many_tokens_and_one_alone_whatever_its_length(clock):
    admission = Admission(AdmissionLimits(max_queued_tokens=100), clock)
    assert refusal(admission, requests(prompt=500), []) is None
    assert refusal(admission, requests(prompt=10), waiting(times=9)) is None
    found = refusal(admission, requests(prompt=11), waiting(times=9))
    assert isinstance(found, QueueFull)
    assert found.reason == "max_num_queued_tokens"
    assert str(found) == "90 prompt tokens are waiting; the limit is 100"
    assert refusal(admission, requests(b"b", prompt=50), waiting(times=9)) is None
    assert refusal(admission, requests(b"b", prompt=51), waiting(times=9)) is not None


def test_several_answers_to_one_prompt_are_one_prompt(clock):
    admission = Admission(AdmissionLimits(max_queued_tokens=100), clock)
    assert refusal(admission, requests(times=50, prompt=60), waiting(prompt=40)) is None


def test_a_key_has_so_many_sequences_and_others_have_theirs(clock):
    admission = Admission(AdmissionLimits(max_num_seqs_per_key=3), clock)
    assert refusal(admission, requests(times=2), []) is None
    admission.admitted(requests(times=2), others_wait=False)
    found = refusal(admission, requests(times=2), [])
    assert isinstance(found, CallerLimit)
    assert found.reason == "max_num_seqs_per_key"
    assert refusal(admission, requests(b"b", times=3), []) is None
    admission.ended(b"a")
    assert refusal(admission, requests(times=2), []) is None


def test_a_key_has_its_tokens_of_a_minute_and_is_told_when_there_are_more(clock):
    admission = Admission(AdmissionLimits(max_tokens_per_minute_per_key=600), clock)
    admission.admitted(requests(prompt=500), others_wait=False)
    assert refusal(admission, requests(), []) is None
    admission.gained(b"a", 300)  # 200 in debt, which take 20 s
    found = refusal(admission, requests(), [])
    assert found.reason == "max_tokens_per_minute_per_key"
    assert found.retry_after_s == pytest.approx(20, abs=0.2)
    assert refusal(admission, requests(b"b"), []) is None
    clock.now += found.retry_after_s
    assert refusal(admission, requests(), []) is None
    clock.now += 3600  # nobody saves up more than a minute's
    admission.gained(b"a", 600)
    assert refusal(admission, requests(), []) is not None


def test_callers_who_are_not_in_debt_are_forgotten(clock):
    admission = Admission(AdmissionLimits(max_tokens_per_minute_per_key=600), clock)
    admission.gained(b"debtor", 6000)
    for number in range(3 * MAX_BUCKETS):
        assert refusal(admission, requests(str(number).encode()), []) is None
    assert len(admission._callers._buckets) <= MAX_BUCKETS
    assert refusal(admission, requests(b"debtor"), []) is not None


def test_when_to_come_again_follows_from_how_fast_the_queue_moves(clock):
    admission = Admission(AdmissionLimits(max_queue=30), clock)
    queue = waiting(times=30)
    assert refusal(admission, requests(), queue).retry_after_s == 1.0  # nobody knows yet
    admission.admitted(requests(), others_wait=True)
    for _ in range(40):
        clock.now += 0.5
        admission.started(1, others_wait=True)
    assert refusal(admission, requests(), queue).retry_after_s == pytest.approx(15, rel=0.05)
    for _ in range(400):
        clock.now += 0.1
        admission.started(1, others_wait=True)
    assert refusal(admission, requests(), queue).retry_after_s == pytest.approx(3, rel=0.2)
    clock.now += 10_000  # it stands
    assert refusal(admission, requests(), queue).retry_after_s == MAX_RETRY_S


def test_times_without_a_queue_say_nothing_about_its_speed():
    rate = StartRate()
    rate.waiting(0.0)
    rate.started(1, 2.0, others_wait=True)
    rate.started(1, 4.0, others_wait=False)
    rate.started(5, 500.0, others_wait=False)
    rate.waiting(1000.0)
    assert rate.seconds_for(1, 1000.0) == pytest.approx(2.0)
