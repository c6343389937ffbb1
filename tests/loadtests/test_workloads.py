"""Workloads: names, sizes, prompts, arrivals."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from dataclasses import replace

import pytest

from loadtests.arrivals import Poisson
from loadtests.lengths import Lengths
from loadtests.workloads import CPU, TokenPrompt, UnknownWorkload, WordPrompt, Workload, find_workloads


def bodies_of(workload: Workload, **options: object) -> list[dict[str, object]]:
    return [json.loads(body) for body in workload.bodies("m", **options)]  # type: ignore[arg-type]


def test_the_cpu_rows_are_those_of_the_targets_page():
    rows = {
        name: (
            row.concurrency,
            row.num_requests,
            row.num_output_tokens.high,
            row.prompt.num_words,
            row.prompt.num_shared_words,
        )
        for name, row in CPU.items()
        if isinstance(row.prompt, WordPrompt)
    }
    assert rows == {
        "c1": (1, 8, 64, 82, 0),
        "c4": (4, 16, 64, 82, 0),
        "c16": (16, 32, 64, 82, 0),
        "shared512": (4, 16, 64, 20, 512),
        "unshared512": (4, 8, 64, 532, 0),
    }


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("c1_128_128", (1, 12, 0, 128, 128)),
        ("c32_512_128", (32, 192, 0, 512, 128)),
        ("c128_512_128", (128, 640, 0, 512, 128)),
        ("c256_256_256", (256, 768, 0, 256, 256)),
        ("prefix", (32, 192, 2048, 128, 64)),
        ("c3_10_20", (3, 18, 0, 10, 20)),
    ],
)
def test_gpu_workloads_are_read_from_their_names(name, shape):
    [found] = find_workloads([name])
    prompt = found.prompt
    assert isinstance(prompt, TokenPrompt)
    measured = (
        found.concurrency,
        found.num_requests,
        prompt.num_shared_tokens,
        prompt.num_tokens,
        found.num_output_tokens,
    )
    *counts, own, output = shape
    assert measured == (*counts, Lengths(own, own), Lengths(output, output))
    assert found.endpoint == "completions"


def test_a_burst_comes_at_once_with_lengths_of_its_own():
    [burst] = find_workloads(["burst"])
    prompts, answers = [len(ids) for ids in burst.prompts()], burst.output_lengths()
    assert (burst.concurrency, burst.num_requests, burst.arrivals, len(prompts)) == (512, 512, None, 512)
    assert (min(prompts) >= 1000, max(prompts) <= 4000, min(answers) >= 64, max(answers) <= 256) == (True,) * 4
    assert (len(set(prompts)) > 400, len(set(answers)) > 150) == (True, True)
    assert [body["max_tokens"] for body in bodies_of(burst)] == answers
    assert burst.output_lengths() == answers != burst.repeated(1).output_lengths()


def test_poisson_arrivals_are_read_from_a_name():
    [found] = find_workloads(["p40_~200_10-20"])
    assert (found.arrivals, found.num_requests, found.concurrency) == (Poisson(40.0), 800, 800)
    assert (found.prompt.num_tokens, found.num_output_tokens) == (Lengths(12, 3200, 200), Lengths(10, 20))


def test_log_normal_lengths_have_their_median_and_stay_between_their_bounds():
    lengths, rng = Lengths.parse("~100"), random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert (min(drawn) >= 6, max(drawn) <= 1600) == (True, True)
    # The median of n draws spreads by 1.25 sigma / sqrt(n) of the logarithm: 0.9 % here.
    assert statistics.median(drawn) == pytest.approx(100, rel=0.04)


@pytest.mark.parametrize("text", ["", "x", "0", "5-3", "~0", "1-2-3", "-1"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ValueError, match="length"):
        Lengths.parse(text)


def test_groups_are_expanded_in_order_and_nothing_comes_twice():
    names = [workload.name for workload in find_workloads(["c4", "cpu", "prefix", "gpu"])]
    assert names == ["c4", "c1", "c16", "shared512", "unshared512", "c32_2048+128_64", "c1_128_128", "c32_512_128", "c128_512_128",
                     "c256_256_256", "b512_1000-4000_64-256"]  # fmt: skip


def test_an_unknown_name_is_answered_with_those_that_exist():
    with pytest.raises(UnknownWorkload, match="shared512"):
        find_workloads(["c99"])


def test_a_chat_body_has_exactly_the_fields_of_a_fair_greedy_run():
    body = bodies_of(CPU["c1"])[0]
    assert body.keys() == {"model", "messages", "max_tokens", "temperature", "stream", "stream_options", "ignore_eos"}
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == (64, 0, True, True)


def test_extra_fields_are_merged_and_null_takes_one_away():
    body = bodies_of(CPU["c1"], ignore_eos=False, extra={"min_tokens": 64, "stream_options": None})[0]
    assert body["min_tokens"] == 64
    assert not {"ignore_eos", "stream_options"} & body.keys()


def test_prompts_are_the_same_at_every_call_and_differ_from_one_another():
    prompts = CPU["c16"].prompts()
    assert prompts == CPU["c16"].prompts()
    assert len({str(prompt) for prompt in prompts}) == 32
    assert len({user[:8] for _, user in prompts}) == 32  # they part within the first words


def test_only_the_shared_workload_shares_a_system_message():
    systems = {system for system, _ in CPU["shared512"].prompts()}
    assert [len(system.split()) for system in systems] == [512]
    assert {system for system, _ in CPU["unshared512"].prompts()} == {""}


def test_warmup_and_repeats_use_other_prompts():
    workload = replace(CPU["shared512"], num_warmup=2, arrivals=Poisson(3.0))
    warmup = workload.warmup()
    assert warmup is not None
    assert (warmup.num_requests, warmup.concurrency, warmup.arrivals) == (2, 1, None)
    systems = {version.prompts()[0][0] for version in (workload, warmup, workload.repeated(1), workload.repeated(2))}
    assert len(systems) == 4
    assert workload.repeated(0) == workload


def test_token_prompts_share_their_prefix_and_stay_within_the_vocabulary():
    workload = Workload(
        "x", TokenPrompt(Lengths(50, 50), 30, vocab_size=200), 4, 20, Lengths(8, 8), endpoint="completions"
    )
    prompts = [body["prompt"] for body in bodies_of(workload)]
    assert {len(prompt) for prompt in prompts} == {80}
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 20
    assert {100 <= token < 200 for prompt in prompts for token in prompt} == {True}


def test_words_can_go_to_the_completions_endpoint():
    body = bodies_of(replace(CPU["shared512"], endpoint="completions"))[0]
    assert "messages" not in body
    assert len(str(body["prompt"]).split()) > 532


def test_poisson_arrivals_have_the_mean_and_the_spread_of_an_exponential():
    arrivals = replace(
        CPU["c1"], num_requests=20_000, arrivals=Poisson(5.0), num_output_tokens=Lengths(1, 1)
    ).arrivals_s()
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert arrivals[0] == 0
    assert min(gaps) >= 0
    # Mean and deviation of an exponential are both 1/rate; the standard error here is under 1 % of it.
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.04)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize(
    "change",
    [
        {"num_requests": 0}, {"num_requests": 100_001}, {"concurrency": 0}, {"concurrency": 4097},
        {"num_requests": 100_000, "num_output_tokens": Lengths(1, 1000)},
    ],
)  # fmt: skip
def test_a_workload_without_bounds_is_refused(change):
    with pytest.raises(ValueError, match="c1"):
        replace(CPU["c1"], **change)


def test_token_ids_cannot_go_to_the_chat_endpoint():
    with pytest.raises(ValueError, match="completions endpoint only"):
        replace(find_workloads(["c1_128_128"])[0], endpoint="chat")


def test_a_vocabulary_too_small_to_draw_from_is_refused():
    with pytest.raises(ValueError, match="vocabulary"):
        find_workloads(["c1_128_128"], vocab_size=100)


def test_a_share_of_a_workload_keeps_its_shape():
    half = CPU["c16"].scaled(0.5)
    assert (half.num_requests, half.concurrency) == (16, 16)
    assert CPU["c1"].scaled(0.01).num_requests == 1


def test_texts_to_edit_have_a_second_version_to_be_written():
    (workload,) = find_workloads(["edit"])
    bodies = bodies_of(workload)
    assert len({body["prompt"] for body in bodies}) == workload.num_requests == 8
    for body in bodies:
        _, text, called, rest = body["prompt"].split("\n\n")
        assert text.count(".") == 12
        assert called.startswith("The second version, in which")
        assert rest == ""
        assert body["max_tokens"] == 128
    assert workload.describe() == "8 requests, 1 streams, texts of 12 sentences to edit in, 128 tokens out"
    assert "edit" not in [found.name for found in find_workloads(["cpu"])]  # whose rows are compared over the years
