"""Pictures, and the records that they are drawn from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import loadtests
from loadtests.__main__ import main
from loadtests.answers import Answer
from loadtests.figures import Run
from loadtests.gpu import WANTED
from loadtests.pictures import draw_traffic
from loadtests.saved import NUM_BINS, read_records, shape_of_run
from loadtests.targets import LARGE, PEER
from loadtests.traffic import METRICS, TRAFFIC
from tests.loadtests.test_commands import last_json

pytest.importorskip("matplotlib")


def test_a_run_is_kept_as_quantiles_and_bins():
    answers = [
        Answer(float(at), at + 10.0, tuple(at + 1.0 + index for index in range(10)), 10, 5, 0, True) for at in range(3)
    ]
    kept = shape_of_run(Run([*answers, Answer(0.0, 99.0, error="no")], 4, None, 12.0))
    assert kept["cdf"]["ttft"] == [1000.0] * 101
    assert (kept["cdf"]["e2e"][0], len(kept["cdf"]["itl"])) == (10_000.0, 101)
    timeline = kept["timeline"]
    assert timeline["bin_s"] == 12.0 / NUM_BINS
    assert max(timeline["in_flight"]) == 3
    assert timeline["in_flight"][-1] == 0
    # Every event is in a bin: 30 over bins of a tenth of a second.
    assert sum(timeline["events_per_s"]) * timeline["bin_s"] == pytest.approx(30)


@pytest.mark.nightly
def test_nothing_answered_is_an_empty_picture_and_no_error(tmp_path):
    kept = shape_of_run(Run([], 1, None, 1.0))
    record = {"server": "s", "workload": "w", "out_tok_per_s": 0.0, "ttft_ms_p50": None, "kind": "run", **kept}
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(record))
    assert main(["plot", str(path), "--out", str(tmp_path / "x.svg")]) == 0


def texts(path: Path) -> str:
    return " ".join(ElementTree.parse(path).getroot().itertext())


@pytest.mark.nightly
def test_two_servers_are_drawn_side_by_side(tmp_path, served, capsys):
    for name in ("ours", "theirs"):
        args = ["--workload", "c1_8_5", "--num-requests", "3", "--name", name, "--out", str(tmp_path / f"{name}.jsonl")]
        assert main(["serve", "--base-url", served[0], *args]) == 0
    pictures = [str(tmp_path / "both.svg"), str(tmp_path / "both.png")]
    assert main(["plot", str(tmp_path / "ours.jsonl"), str(tmp_path / "theirs.jsonl"), "--out", *pictures]) == 0
    assert last_json(capsys)[1]["servers"] == ["ours", "theirs"]
    said = texts(tmp_path / "both.svg")
    assert all(word in said for word in ("ours", "theirs", "time to first token", "requests in flight"))
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert [record["server"] for record in read_records([tmp_path / "ours.jsonl"])] == ["ours"]


def test_a_sweep_finds_its_knee_and_draws_it(tmp_path, served, capsys):
    args = ["--workload", "c1_8_5", "--concurrency", "1", "2", "--requests-per-stream", "2", "--all"]
    args += ["--plot", str(tmp_path / "x.svg"), "--out", str(tmp_path / "x.jsonl"), "--name", "toy"]
    assert main(["sweep", "--base-url", served[0], *args]) == 0
    out, summary = last_json(capsys)
    assert [level["load"] for level in summary["levels"]] == [1, 2]
    assert [level["requests"] for level in summary["levels"]] == [12, 12]
    assert summary["knee"] in (1, 2)
    assert "knee (best throughput for its latency): " in out
    assert "suggested: " in out
    drawn = texts(tmp_path / "x.svg")
    for words in ("throughput by load", "streams (log scale)", "ms (log scale)", "p50", "p99"):
        assert words in drawn
    assert main(["plot", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "again.svg")]) == 0
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "x.svg").read_bytes()


@pytest.mark.parametrize("tpot_ms", [None, 0.0, 2.0])
@pytest.mark.nightly
def test_levels_are_drawn_whatever_was_measured(tmp_path, tpot_ms):
    """Of one token there is no TPOT, and of a server that takes no time one of 0, which has no logarithm."""
    kept = {"cdf": {}, "timeline": {"bin_s": 0.0, "events_per_s": [], "in_flight": []}}
    figures = {
        "ok": 1,
        "ttft_ms_p50": 1.0,
        "ttft_ms_p99": 2.0,
        "tpot_ms_p50": tpot_ms,
        "tpot_ms_p99": tpot_ms,
        "in_tok_per_s": 1.0,
    }
    lines = [
        json.dumps({"kind": "level", "server": "s", "workload": "w", "load": load, "rate_per_s": None, "out_tok_per_s": 10.0 * load,
                    "e2e_ms_mean": 5.0, **figures, **kept})
        for load in (1, 2)
    ]  # fmt: skip
    path = tmp_path / "levels.jsonl"
    path.write_text("\n".join(lines))
    assert main(["plot", str(path), "--out", str(tmp_path / "x.png")]) == 0


def test_rates_in_place_of_streams(served, capsys):
    args = ["--workload", "c1_8_5", "--rates", "300", "200", "--seconds", "0.05", "--all", "--base-url", served[0]]
    assert main(["sweep", *args]) == 0
    levels = last_json(capsys)[1]["levels"]
    assert [(level["load"], level["rate_per_s"], level["requests"]) for level in levels] == [
        (200, 200, 12),
        (300, 300, 15),
    ]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["sweep", "--workload", "cpu"], "is a group"),
        (["sweep", "--requests-per-stream", "0"], "must be positive"),
        (["sweep", "--plot", "x.gif"], ".svg or .png"),
        (["serve", "--plot", "nowhere/x.svg"], "no folder nowhere"),
        (["plot", "README.md", "--out", "x.svg"], "not a run"),
        (["plot", "nothing.jsonl", "--out", "x.svg"], "No such file"),
    ],
)
def test_what_cannot_be_drawn_is_said_before_anything_is_measured(args, reason, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(args) == 2
    assert reason in capsys.readouterr().err


def test_without_matplotlib_a_picture_is_refused_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "loadtests.charts", raising=False)
    monkeypatch.delattr(loadtests, "charts", raising=False)
    assert main(["serve", "--plot", "x.png"]) == 2
    assert "pip install 'oneloop[bench]'" in capsys.readouterr().err


@pytest.mark.nightly
def test_traffic_is_drawn_beside_what_the_peer_took(tmp_path):
    figures = {f"{name}.{key}": 7.0 for name in TRAFFIC for key in WANTED}
    draw_traffic(tmp_path / "traffic.svg", {LARGE: figures})
    said = texts(tmp_path / "traffic.svg")
    assert all(title in said for title in TRAFFIC.values())
    assert all(f"{LARGE}: {metric.title}" in said for metric in METRICS)
    assert f"{PEER}, p99" in said
