"""What a person sees while the server starts."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from runtime.api import LoadProgress
from runtime.speculate.config import SpeculativeConfig
from server.process.terminal import StartupDisplay, summary, url_of
from tests.server.pooling.embedders import EMBEDDER


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def reports() -> list[LoadProgress]:
    return [
        LoadProgress("download", done, 4096, "B") for done in (0, 1024, 4096)
    ] + [LoadProgress("warm-up")]  # fmt: skip


def test_into_a_file_goes_one_line_per_phase():
    out = io.StringIO()
    display = StartupDisplay(out)
    for progress in reports():
        display.report(progress)
    assert list(display.finish()) == ["download", "warm-up"]
    assert out.getvalue().splitlines() == ["oneloop: download …", "oneloop: warm-up …"]


def test_on_a_terminal_what_can_be_counted_gets_a_bar():
    out = Screen()
    display = StartupDisplay(out)
    for progress in reports():
        display.report(progress)
    display.finish()
    assert "download" in out.getvalue()
    assert "4.00k" in out.getvalue()
    assert out.getvalue().endswith("oneloop: warm-up …\n")  # kernels may take a minute, and count nothing
    assert "oneloop: download" not in out.getvalue()


def test_a_phase_that_comes_back_adds_up(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("server.process.terminal.time.monotonic", lambda: now[0])
    display = StartupDisplay(io.StringIO())
    for phase, seconds in (("a", 1.0), ("b", 2.0), ("a", 4.0)):
        display.report(LoadProgress(phase))
        now[0] += seconds
    assert display.finish() == {"a": 5.0, "b": 2.0}


def test_every_second_since_the_process_began_belongs_to_a_phase(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("server.process.terminal.time.monotonic", lambda: now[0])
    display = StartupDisplay(io.StringIO(), began_s=7.0)
    for phase in ("import", "weights"):
        display.report(LoadProgress(phase))
        now[0] += 2.0
    assert display.finish() == {"start": 3.0, "import": 2.0, "weights": 2.0}


@pytest.mark.parametrize(
    ("address", "url"), [(("127.0.0.1", 8000), "http://127.0.0.1:8000"), (("::1", 80, 0, 0), "http://[::1]:80")]
)
def test_the_url_is_one_a_browser_takes(address, url):
    assert url_of(address) == url


@pytest.mark.parametrize(
    ("pooler", "shown", "hidden"),
    [(None, "/v1/chat/completions", "/v1/embeddings"), (EMBEDDER, "/v1/embeddings", "/v1/chat/completions")],
)
async def test_the_summary_names_the_routes_that_the_model_is_served_for(serve, pooler, shown, hidden):
    loaded = (await serve(pooler=pooler)).service.lifecycle.require_model()
    text = summary(loaded, "http://127.0.0.1:1", {}, 1.0)
    assert shown in text
    assert hidden not in text
    assert ("; to embed, token_embed" in text) == (pooler is not None)


async def test_the_summary_is_at_most_a_dozen_lines_with_all_that_may_be_in_it(several):
    _, turns = await several("abc")
    loaded = turns["a"].loaded
    loaded.engine.model = replace(loaded.engine.model, topology="18 NVLinks", speculative="ngram")
    loaded = replace(loaded.in_turns(turns["a"]), beside=loaded)
    lines = summary(loaded, "http://127.0.0.1:1", {"import": 1.0}, 1.0).splitlines()
    assert {line.split()[0] for line in lines} >= {"devices", "drafts", "beside", "others", "APIs"}
    assert len(lines) <= 12


async def test_the_summary_says_how_devices_are_connected_where_that_is_known(serve):
    loaded = (await serve()).service.lifecycle.require_model()
    assert "\n  devices" not in summary(loaded, "http://127.0.0.1:1", {}, 1.0)
    loaded.engine.model = replace(loaded.engine.model, topology="18 NVLinks, PCIe 5 x16")
    assert "\n  devices   18 NVLinks, PCIe 5 x16\n" in summary(loaded, "http://127.0.0.1:1", {}, 1.0)


async def test_the_summary_tells_the_type_of_stored_weights_from_the_type_they_are_computed_in(serve):
    loaded = (await serve()).service.lifecycle.require_model()
    assert "GGUF" not in summary(loaded, "http://127.0.0.1:1", {}, 1.0)
    loaded.engine.model = replace(loaded.engine.model, weights_bytes=92 << 20, dtype="float32", device="cpu")
    text = summary(replace(loaded, gguf_quantization="Q4_1"), "http://127.0.0.1:1", {}, 1.0)
    assert "\n  weights   92 MiB from a GGUF file of type Q4_1, computed in float32 on cpu\n" in text


async def test_the_summary_says_in_capitals_that_guesses_are_right_by_chance(serve):
    loaded = (await serve()).service.lifecycle.require_model()
    assert "drafts" not in summary(loaded, "http://127.0.0.1:1", {}, 1.0)
    guessing = str(SpeculativeConfig.of({"method": "ngram", "synthetic_acceptance": 0.7}))
    loaded.engine.model = replace(loaded.engine.model, speculative=guessing)
    text = summary(loaded, "http://127.0.0.1:1", {}, 1.0)
    assert "drafts    ngram" in text
    assert "SYNTHETIC ACCEPTANCE 0.7: ANSWERS ARE NONSENSE" in text
