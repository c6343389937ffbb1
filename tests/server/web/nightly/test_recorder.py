"""The dashboard's recorder, its words about slow requests, and its tables of engines, adapters and tiers."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest

from runtime.api import Metric
from tests.server.web.feed import Clock, fill
from tests.server.web.nightly.browser import PHONE, needs_axe, needs_chromium

pytestmark = needs_chromium
RUNNING = "document.querySelector('#tiles .value').textContent"
# The page's own recorder, filled by hand: what it gives as a file is read back.
ROUND = """
const recorder = new m.Recorder(), [first, last] = args;
for (let at = first; at <= last; at++) await recorder.take(at, JSON.stringify({wall_s: at, models: [], unloaded: []}));
const recording = await m.Recording.of(await recorder.file());
return [recording.length, recording.seconds[0], recording.seconds.at(-1)];
"""


async def test_an_hour_is_kept_and_no_more(serve, page_of):
    page = page_of(await serve())
    await page.open("/dashboard")
    assert await page.imported("recorder.js", ROUND, 1, 10) == [10, 1, 10]
    assert await page.imported("recorder.js", ROUND, 1, 130) == [130, 1, 130]
    length, first, last = await page.imported("recorder.js", ROUND, 1, 5000)
    assert last == 5000
    assert 1300 < first <= 1400, "whole packs of a minute go"
    assert length == last - first + 1


async def test_what_was_is_looked_back_at(serve, page_of):
    server = await serve()
    clock = Clock(server)
    fill(server.engine)
    page = page_of(server)
    await page.open("/dashboard")
    numbers = iter(range(3, 100))
    healthy = server.engine.health()
    for expected in ("3", "4"):
        server.engine.health = lambda number=next(numbers): replace(healthy, num_running=number)
        clock.tick()
        await page.until(f"{RUNNING} === '{expected}'")
    await page.click("#look-back")
    await page.until("!document.getElementById('playback').hidden")
    assert await page.run("return document.getElementById('moment').max") == "2"
    seek = "const m = document.getElementById('moment'); m.value = arguments[0]; m.dispatchEvent(new Event('input'))"
    await page.run(seek, "1")
    assert await page.run(f"return {RUNNING}") == "3"
    server.engine.health = lambda: replace(healthy, num_running=9)
    clock.tick()
    await page.run(seek, "0")
    assert await page.run(f"return {RUNNING}") == "0", "what comes now does not disturb it"
    await page.click("#to-live")
    await page.until(f"{RUNNING} === '9'")


def recording(*lines: str) -> bytes:
    return gzip.compress("\n".join(('{"oneloop_recording":1}', *lines)).encode(), mtime=0)


PUT = """
const files = new DataTransfer(), input = document.getElementById("record-file");
files.items.add(new File([Uint8Array.from(arguments[0])], "a.jsonl.gz"));
input.files = files.files;
input.dispatchEvent(new Event("change"));
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (b"nothing", "no recording"),
        (gzip.compress(b"{}\n{}", mtime=0), "no recording"),
        (recording(), "no recording"),
        (recording("{"), "damaged"),
        (recording('{"wall_s": 1, "models": [{}], "unloaded": 3}'), "damaged"),
    ],
)
async def test_a_file_that_is_no_recording_says_so(serve, page_of, given, said):
    server = await serve()
    Clock(server)
    page = page_of(server)
    await page.open("/dashboard")
    await page.run(PUT, list(given))
    await page.until(f"document.getElementById('record-words').textContent.includes('{said}')")
    assert await page.run("return document.getElementById('playback').hidden")


async def test_a_recording_of_another_day_is_opened(serve, page_of):
    server = await serve()
    Clock(server)
    fill(server.engine)
    page = page_of(server)
    await page.open("/dashboard")
    event = json.loads(server.service.feed._snapshots.first().removeprefix(b"data: "))
    event["models"][0]["running"] = 77
    await page.run(PUT, list(recording(json.dumps({**event, "wall_s": 1_700_000_000.5}))))
    await page.until("!document.getElementById('playback').hidden")
    assert await page.run(f"return {RUNNING}") == "77"
    assert "2023" in await page.run("return document.getElementById('moment-words').value")
    await page.run("location.hash = '#requests/first'")
    await page.until("!document.getElementById('request-detail').hidden")
    assert "preempted: the KV cache was full" in (await page.texts(".why"))[0]


WHY = """
const request = {
  id: "slow", arrival: 10, scheduled: 12, firstToken: 15, lastToken: 16, finished: 16, delivered: 16, held: 0,
  prompt: 900, cached: 100, output: 11, events: args[0], finish: "stop",
};
const other = (id, arrival, scheduled, finished) =>
  ({...request, id, arrival, scheduled, finished, delivered: finished, events: []});
const all = [request, other("early", 9, 11, 12), other("long", 1, 2, 20), other("gone", 1, 2, 9), other("late", 30, null, null)];
const step = (number, from, to, prompts, decodes) => [number, from, to, prompts, decodes, 0, false, null];
return m.why(request, all, [step(7, 12, 14.5, 1800, 3), step(8, 14.5, 15, 400, 3), step(9, 15, 15.05, 0, 4)], 40);
"""


async def test_a_slow_request_says_behind_whom_beside_what_and_in_which_step(serve, page_of):
    page = page_of(await serve())
    await page.open("/dashboard")
    chunks = [["chunk", 12, 400], ["chunk", 14.5, 400]]
    assert await page.imported("why.js", WHY, chunks) == [
        "3.00 s: its prompt: 800 tokens computed (chunks: 2), 100 found in the cache; "
        "prompt tokens of others beside it: 1,400; "
        "its longest step, 7, took 2.50 s (prompt tokens: 1,800, decodes: 3)",
        "2.00 s: queued behind 1 that came first (early)",
        "1.00 s: 11 tokens, 100 ms each; other requests beside it: 1",
    ]
    taken = await page.imported("why.js", WHY, [*chunks, ["preempted", 15.1, 0], ["resumed", 15.9, 0]])
    assert "800 ms: preempted: its KV blocks went to those that ran (long)" in taken


async def test_adapters_tiers_and_engines_have_tables(serve, page_of):
    server = await serve()
    Clock(server)
    metrics = server.engine.metrics
    places = {(("place", "memory"),): 3.0, (("place", "slot"),): 2.0}
    server.engine.metrics = lambda: [
        *metrics(),
        Metric("lora_adapters", "", "gauge", {(): 5.0}),
        Metric("lora_resident", "", "gauge", places),
        Metric("kv_offload_blocks", "", "gauge", {(("tier", "memory"),): 7.0}),
    ]
    page = page_of(server)
    await page.open("/dashboard")
    assert await page.texts("#adapters tr") == ["adapters\t\t5", "resident\tmemory\t3", "resident\tslot\t2"]
    assert await page.texts("#tiers tr") == ["blocks\tmemory\t7"]
    ((name, device),) = await page.run(
        "return [...document.querySelectorAll('#fleet tr')].map(each => [each.cells[0].textContent, each.cells[1].textContent])"
    )
    assert (name, device) == ("tiny", server.engine.model.device)


async def test_a_server_without_adapters_and_tiers_shows_none(serve, page_of):
    server = await serve()
    Clock(server)
    page = page_of(server)
    await page.open("/dashboard", size=PHONE)
    assert not await page.run("return document.getElementById('adapters').checkVisibility()")
    assert not await page.run("return document.getElementById('tiers').checkVisibility()")
    assert await page.run("return document.documentElement.scrollWidth <= innerWidth")


@needs_axe
async def test_axe_finds_nothing_serious_while_it_looks_back(serve, page_of):
    server = await serve()
    Clock(server)
    fill(server.engine)
    page = page_of(server)
    await page.open("/dashboard")
    await page.click("#look-back")
    await page.until("!document.getElementById('playback').hidden")
    assert await page.serious() == []
    await page.run("location.hash = '#requests/first'")
    await page.until("!document.getElementById('request-detail').hidden")
    assert await page.serious() == []
