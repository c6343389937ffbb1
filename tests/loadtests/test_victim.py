"""A stream beside requests that cost much: which gaps count, and what is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from loadtests import victim
from loadtests.__main__ import main
from loadtests.address import Address
from loadtests.hostile import ATTACKS
from loadtests.processes import ServerProcess
from loadtests.victim import gaps_ms, row
from tests.loadtests.test_processes import toy, wait_healthy


def test_a_gap_counts_for_the_time_that_it_touches():
    times_s = [1.0, 2.0, 4.0, 4.5, 9.0]
    assert gaps_ms(times_s) == [1000, 2000, 500, 4500]
    assert gaps_ms(times_s, until_s=1.5) == [1000]
    assert gaps_ms(times_s, since_s=3.0, until_s=4.2) == [2000, 500]
    assert gaps_ms(times_s, since_s=5.0) == [4500]
    assert gaps_ms([]) == gaps_ms([1.0]) == []


@pytest.mark.parametrize(
    "name", ["nothing", "1024-prompts", "schemas-and-leave", "schemas-answered", "picture-bombs", "pictures"]
)
def test_the_bodies_of_an_attack_are_json(name):
    assert all(json.loads(body) for body in ATTACKS[name].bodies())


def test_all_of_an_attack_is_told_in_a_row():
    result = {
        "answers": {"200": 1, "429": 2}, "attack_s": 1.5, "median_ms": 10.0, "longest_ms": 25.0, "ratio": 2.5, "gaps": 40,
        "over_target": 0, "outlasted": True,
        "rss_before_mib": 100.4, "rss_after_mib": 101.2, "memory_kept": True,
    }  # fmt: skip
    assert row("x", result) == "| x | 1 × 200, 2 × 429 | 1.5 | 10.0 | 25.0 | 2.5 | 0 of 40 | 100 → 101 |"
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


@pytest.mark.slow
def test_a_stream_that_ends_before_its_attack_is_told(tmp_path, capsys):
    process, address = toy(tmp_path)
    assert isinstance(process, ServerProcess)
    with process:
        wait_healthy(process, address)
        args = ["--base-url", address.url, "--pid", str(process.pid), "--attack", "nothing", "--max-tokens", "40"]
        assert main(["victim", *args]) == 1
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])["nothing"]
    assert found["answers"] == {"200": 1}
    assert found["rss_before_mib"] > 0
    assert found["memory_kept"]
    assert "(the stream ended first)" in out


@pytest.mark.slow
def test_without_a_url_a_server_is_started_and_ended(monkeypatch, capsys):
    processes: list[ServerProcess] = []

    class Noted(ServerProcess):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            processes.append(self)

    monkeypatch.setattr(victim, "ServerProcess", Noted)
    monkeypatch.setattr(victim, "OURS", (sys.executable, "-m", "tests.loadtests.toy_server"))
    assert main(["victim", "--attack", "nothing", "--max-tokens", "40"]) == 1  # a short stream
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["nothing"]["rss_before_mib"] > 0
    assert not any(Path(f"/proc/{process.pid}").exists() for process in processes)
    assert main(["victim", "--attack", "nothing", "--", "dies"]) == 2
    assert "loadtests victim:" in capsys.readouterr().err
