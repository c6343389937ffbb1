"""`steps`: the engine for real, on a CPU, in the process that the command starts."""

from __future__ import annotations

import json

import pytest

from loadtests import steps
from loadtests.__main__ import main
from loadtests.steps import figures_of, records_of, tell
from tests.loadtests.test_commands import last_json

SMALL = ["--", "--device", "cpu", "--prompt-tokens", "9", "--decode-tokens", "4", "--kv-cache-bytes", str(1 << 20)]


@pytest.mark.nightly
def test_steps_prints_a_table_and_leaves_a_record(model, tmp_path, capsys):
    out_file = tmp_path / "records.jsonl"
    args = [
        "--model",
        str(model),
        "--batch",
        "1",
        "2",
        "--prefill",
        "2x20",
        "--ttft",
        "8",
        "--output-json",
        str(out_file),
    ]
    assert main(["steps", *args, *SMALL]) == 0
    out, record = last_json(capsys)
    assert "decode, batch 1, ms" in out
    assert record["figures"].keys() == {"decode_ms.1", "decode_ms.2", "prefill_tok_per_s.2x20", "ttft_ms.8"}
    assert (record["model"], record["start"]["device"]) == ("tiny", "cpu")
    assert json.loads(out_file.read_text()) == record


@pytest.mark.nightly
def test_a_profile_is_shown_and_left_as_small_files(model, tmp_path, capsys):
    args = ["--model", str(model), "--profile", str(tmp_path / "p"), "--profile-batch", "2"]
    assert main(["steps", *args, *SMALL]) == 0
    out, record = last_json(capsys)
    assert "decode at batch 2 on" in out
    assert record["details"][0]["steps"] > 0
    assert {path.name for path in (tmp_path / "p").iterdir()} == {"decode-2.txt", "decode-2.json"}


def test_an_option_that_the_engine_does_not_know_fails_the_command(model, capsys):
    assert main(["steps", "--model", str(model), "--batch", "1", "--", "--no-such-option", "1"]) == 1
    assert last_json(capsys)[1]["figures"] == {}


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    assert main(["steps", "--model", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> list[str]:
    """What `steps` would start."""
    seen: list[list[str]] = []

    def note(args) -> int:
        seen.append(steps.command_of(args))
        return 0

    monkeypatch.setattr(steps, "main", note)
    main(["steps", "--model", "m", *args])
    return seen[0][3:]


def test_without_names_every_row_of_the_targets_page_is_measured(monkeypatch):
    assert " ".join(command(monkeypatch)) == (
        "--model m --batch 1 8 32 64 128 256 --prefill 8x8192 64x512 --ttft 128 --throughput"
    )  # fmt: skip


def test_with_names_only_what_is_named_is_measured(monkeypatch):
    found = command(monkeypatch, "--throughput", "--ttft", "7", "--", "--dtype", "bfloat16")
    assert " ".join(found) == "--model m --ttft 7 --throughput --dtype bfloat16"


def test_a_flag_without_values_takes_those_of_the_page(monkeypatch):
    assert command(monkeypatch, "--prefill") == ["--model", "m", "--prefill", "8x8192", "64x512"]
    assert command(monkeypatch, "--profile", "d")[2:] == ["--profile", "d", "--profile-batch", "1", "256"]


def test_lines_that_are_no_figures_are_shown_and_passed_over(capsys):
    lines = ["loading\n", "[1]\n", '{"figure": "ttft", "tokens": 8, "ms": 2.0}\n']
    assert list(records_of(lines)) == [{"figure": "ttft", "tokens": 8, "ms": 2.0}]
    assert "loading" in capsys.readouterr().err


def test_a_figure_that_failed_is_not_a_figure():
    failed = {"figure": "decode", "batch": 8, "error": "too many"}
    assert figures_of([failed, {"figure": "decode", "batch": 1, "ms": 2.0}]) == {"decode_ms.1": 2.0}


def test_gaps_of_the_gpu_are_shown_where_the_engine_counts_them():
    gaps = {"count": 100, "mean_s": 2e-6, "p50_s_at_most": 1e-6, "p90_s_at_most": 5e-6, "p99_s_at_most": 1e-5}
    line = tell({"figure": "decode", "batch": 1, "ms": 1.0, "runs": [1.0], "gpu_idle_gap": gaps})
    assert line == "  decode: batch 1, ms 1.0; GPU idle between steps mean 2 us, p99 <= 10 (100)"
