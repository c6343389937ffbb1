"""A stream beside requests that cost much: which gaps count, and what is printed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from loadtests import victim
from loadtests.__main__ import main
from loadtests.address import Address
from loadtests.compare import ServerFailed
from loadtests.hostile import ATTACKS
from loadtests.processes import ServerProcess
from loadtests.victim import Usual, gaps_ms, row
from tests.loadtests.test_processes import toy, wait_healthy


def test_a_gap_counts_for_the_time_that_it_touches():
    times_s = [0.0, 0.5, 1.0, 2.0, 4.0, 4.5, 9.0]  # of which two are a prompt's and a first token's
    assert gaps_ms(times_s) == {0: 1000, 1: 2000, 2: 500, 3: 4500}
    assert gaps_ms(times_s, since_s=3.0) == {1: 2000, 2: 500, 3: 4500}
    assert gaps_ms(times_s, since_s=5.0) == {3: 4500}
    assert gaps_ms([]) == gaps_ms([1.0]) == {}


def test_a_gap_is_measured_by_those_about_its_place():
    growing = [10.0 + place / 10 for place in range(1000)]
    growing[500] = 400.0  # the machine was away
    usual = Usual(growing)
    assert usual.by_place[500] == pytest.approx(60, abs=0.2)
    assert usual.ratios({100: 40.0, 500: 60.0, 4000: 218.0}) == pytest.approx([2.0, 1.0, 2.0], rel=0.02)


@pytest.mark.parametrize(
    "name", ["nothing", "1024-prompts", "schemas-and-leave", "schemas-answered", "picture-bombs", "pictures"]
)
def test_the_bodies_of_an_attack_are_json(name):
    assert all(json.loads(body) for body in ATTACKS[name].bodies())


def test_all_of_an_attack_is_told_in_a_row():
    result = {
        "answers": {"200": 1, "429": 2}, "attack_s": 1.5, "median_ms": 10.0, "longest_ms": 25.0, "median_ratio": 1.1, "ratio": 2.5,
        "gaps": 40, "over_target": 0, "outlasted": True,
        "rss_before_mib": 100.4, "rss_after_mib": 101.2, "memory_kept": True,
    }  # fmt: skip
    assert row("x", result) == "| x | 1 × 200, 2 × 429 | 1.5 | 10.0 | 25.0 | 1.1 | 2.5 | 0 of 40 | 100 → 101 |"
    grown = row("x", result | {"rss_after_mib": 120.0, "memory_kept": False})
    assert grown.endswith("| 100 → 120 (over a tenth more) |")


async def test_prompts_that_nobody_sent_before_fill_a_cache_until_memory_does_not_grow(monkeypatch):
    sent, resident = [], [400.0]

    async def exchanged(address, request, timeout_s, clock):
        sent.append(json.loads(request.partition(b"\r\n\r\n")[2])["prompt"])
        resident[0] += 300.0 if len(sent) < 4 else 2.0

    monkeypatch.setattr(victim, "exchange", exchanged)
    address = Address.parse("http://127.0.0.1:1")
    assert await victim.fill_cache(address, lambda: resident[0], timeout_s=1.0) == 4
    prompts = [tuple(prompt) for each in sent for prompt in each]
    assert len({*prompts}) == len(prompts) == 4 * victim.FILLING_PROMPTS


def streams_of(monkeypatch, *num_pieces: int, failure: str | None = None) -> None:
    """So many pieces in one stream after the other, ten milliseconds apart; then streams do not end."""
    streams = iter(num_pieces)

    async def exchanged(address, request, timeout_s, clock, recording):
        num = next(streams, None)
        if num is None:
            await asyncio.Event().wait()
        recording.times.extend(0.010 * place for place in range(num))
        recording.failure = failure
        return recording

    monkeypatch.setattr(victim, "exchange", exchanged)


async def test_a_whole_stream_alone_says_what_is_usual(monkeypatch):
    streams_of(monkeypatch, 50)
    gaps = await victim.alone(Address.parse("http://127.0.0.1:1"), max_tokens=48, timeout_s=1.0)
    assert gaps == pytest.approx([10.0] * 47)


@pytest.mark.parametrize(("num", "failure", "message"), [(0, None, "no events"), (50, "no end within 1 s", "no end")])
async def test_where_nothing_streams_no_attack_is_sent(monkeypatch, num, failure, message):
    streams_of(monkeypatch, num, failure=failure)
    with pytest.raises(ServerFailed, match=message):
        await victim.alone(Address.parse("http://127.0.0.1:1"), max_tokens=48, timeout_s=1.0)


async def test_another_stream_follows_one_that_ends_and_gaps_of_all_count(monkeypatch):
    streams_of(monkeypatch, 40, 60)
    monkeypatch.setattr(victim, "send_all", lambda *_: ["200"])
    monkeypatch.setattr(victim, "EVENTS_BEFORE", 0)
    monkeypatch.setattr(victim, "EVENTS_AFTER", 0)
    monkeypatch.setattr(victim, "WallClock", lambda: FixedClock())
    address = Address.parse("http://127.0.0.1:1")
    found = await victim.beside(address, ATTACKS["nothing"], Usual([5.0] * 10), max_tokens=48, timeout_s=1.0)
    assert (found["gaps"], found["over_target"], found["outlasted"]) == (37 + 57, 0, True)
    assert (found["ratio"], found["median_ratio"]) == (2.0, 2.0)


class FixedClock:
    def now(self) -> float:
        return 0.0


@pytest.fixture
def known_usual(monkeypatch):
    async def alone(address, *, max_tokens, timeout_s):
        return [1.0] * 10

    monkeypatch.setattr(victim, "alone", alone)


@pytest.mark.usefixtures("known_usual")
def test_a_stream_that_breaks_beside_an_attack_is_told(tmp_path, capsys):
    process, address = toy(tmp_path)
    assert isinstance(process, ServerProcess)
    with process:
        wait_healthy(process, address)
        args = ["--base-url", address.url, "--pid", str(process.pid), "--attack", "nothing", "--max-tokens", "20"]
        assert main(["victim", *args]) == 1
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])["nothing"]
    assert found["answers"] == {"200": 1}
    assert found["rss_before_mib"] > 0
    assert found["memory_kept"]
    assert "(a stream broke)" in out


@pytest.mark.usefixtures("known_usual")
def test_without_a_url_a_server_is_started_and_ended(monkeypatch, capsys):
    processes: list[ServerProcess] = []

    class Noted(ServerProcess):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            processes.append(self)

    monkeypatch.setattr(victim, "ServerProcess", Noted)
    monkeypatch.setattr(victim, "OURS", (sys.executable, "-m", "tests.loadtests.toy_server"))
    assert main(["victim", "--attack", "nothing", "--max-tokens", "20"]) == 1  # a short stream
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["nothing"]["rss_before_mib"] > 0
    assert not any(Path(f"/proc/{process.pid}").exists() for process in processes)
    assert main(["victim", "--attack", "nothing", "--", "dies"]) == 2
    assert "loadtests victim:" in capsys.readouterr().err
