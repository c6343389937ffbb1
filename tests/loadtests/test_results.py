"""RESULTS.md comes from records, and the one in the tree is what they say."""

from __future__ import annotations

import json

import pytest

from loadtests.__main__ import main
from loadtests.gpu import WANTED
from loadtests.results import RECORDS, RESULTS, figures_table, notes_of, page_cells, read_records, results_page
from loadtests.targets import HTTP, LARGE, MODELS, ROWS, SMALL


def record(date: str, model: str = SMALL, **figures: float) -> dict[str, object]:
    return {
        "command": "steps", "model": model, "date": date, "machine": "NVIDIA H200", "command_line": f"steps of {date}",
        "figures": {key.replace("__", "."): value for key, value in figures.items()},
    }  # fmt: skip


def test_the_page_in_the_tree_is_made_from_the_records_in_the_tree():
    page = RESULTS.read_text()
    assert page == results_page(read_records([RECORDS]), notes_of(page)), "run python -m loadtests results"


def test_a_cell_says_what_was_measured_how_it_compares_and_whether_it_is_enough():
    figures = {"decode_ms.1": 0.8, "decode_ms.8": 0.6, "throughput_tok_per_s": 36_132.0}
    table = [line.split("  ") for line in figures_table(SMALL, figures).splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in table]
    assert cells[1:] == [
        ["decode, batch 1, ms", "0.800", "1.659", "2.07x", "<= 0.45", "missed"],
        ["decode, batch 8, ms", "0.600", "1.915", "3.19x", "<= 0.6", "met"],
        ["256 requests, 100-1024 in and out, tok/s", "36,132", "23,124", "1.56x", ">= 29,000", "met"],
    ]


def test_what_is_on_no_target_page_is_shown_without_a_verdict():
    assert figures_table("tiny", {"decode_ms.3": 1.5}).splitlines()[1].split() == [
        "decode_ms.3",
        "1.500",
        "-",
        "-",
        "-",
        "-",
    ]


def test_the_last_record_of_a_figure_counts_and_names_its_command():
    records = [record("2026-01-01", decode_ms__1=9.0, decode_ms__8=2.0), record("2026-01-02", decode_ms__1=1.0)]
    page = results_page(records, "None.")
    assert "| decode, batch 1, ms | 1.000 |" in page
    assert "| decode, batch 8, ms | 2.000 |" in page
    assert "2026-01-01, NVIDIA H200: `steps of 2026-01-01`  \n2026-01-02" in page
    assert page.count("Not measured yet.") == len(MODELS) - 1


def test_every_row_of_both_models_is_on_the_page():
    page = results_page([], "None.")
    rows = [row for row in ROWS if row.group != HTTP]
    assert page.count("| not measured |") == sum(len({*row.target, *row.vllm}) for row in rows)
    assert {row.key for row in ROWS if row.vllm or row.target} == {row.key for row in ROWS}


def test_a_row_of_the_page_has_the_ratio_to_vllm_and_a_mark_at_the_target():
    rows = {row.key: row for row in ROWS}
    assert page_cells(rows["decode_ms.1"], SMALL, 0.8) == ["decode, batch 1, ms", "0.800", "1.659 (2.07x)", "0.45✗"]
    assert page_cells(rows["decode_ms.8"], SMALL, 0.6)[3] == "0.6✓"
    assert page_cells(rows["start_warm_s"], SMALL, None)[1:] == ["not measured", "", "3.5"]


def test_traffic_has_a_row_for_each_measured_workload_then_vllm_and_the_targets():
    figures = {
        f"{name}.{key}": 7.25 for name in ("c32_512_128", "c256_256_256@70%", "p40_256_256") for key in WANTED
    } | {"c256_256_256.req_per_s": 60.0}
    page = results_page([record("2026-01-01", LARGE, **figures)], "None.")
    assert page.count("| traffic |") == 1
    assert (
        "| `c32_512_128` | 7 | 7/7 | 7.25/7.25 | 7.2/7.2 | 7/7 | 7.2 |\n"
        "| vLLM | 3,670 | 286/415 | 6.42/- | -/22.0 | -/1,163 | 250.0 |\n"
        "| target | 4,300✗ | 150✓/- | 6.2✗/- | -/20✓ |||\n"
    ) in page
    assert "| `c256_256_256@70%`, 42.0/s |" in page
    assert "| target || -/35✓ |||| 20✓ |" in page
    assert "| `c128_512_128`" not in page


def test_the_command_writes_the_page_and_keeps_the_notes(tmp_path, capsys):
    records, page = tmp_path / "r.jsonl", tmp_path / "R.md"
    records.write_text(json.dumps(record("2026-01-01", decode_ms__1=0.7)) + "\n")
    assert main(["results", str(records), "--out", str(page)]) == 0
    page.write_text(page.read_text().replace("None yet.", "Attention is\n\n## half of it"))
    assert main(["results", str(records), "--out", str(page)]) == 0
    assert page.read_text().endswith("\n## Notes\n\nAttention is\n\n## half of it\n")
    assert "| 0.700 |" in page.read_text()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["figures"][SMALL] == {"decode_ms.1": 0.7}


@pytest.mark.parametrize("text", ["{oops", "[]", '{"model": "m"}'])
def test_a_file_that_holds_no_records_is_refused(tmp_path, text, capsys):
    (tmp_path / "r.jsonl").write_text(text)
    assert main(["results", str(tmp_path / "r.jsonl"), "--out", str(tmp_path / "R.md")]) == 2
    assert "r.jsonl, line 1" in capsys.readouterr().err
    assert not (tmp_path / "R.md").exists()
