"""Tables from canned results."""

from __future__ import annotations

import json

import pytest

from loadtests.__main__ import main
from loadtests.report import comparison_summary, comparison_table, serve_remarks, serve_table


def run_record(server: str, number: int, workload: str, speed: float, **fields: object) -> dict[str, object]:
    return {
        "kind": "run", "server": server, "round": number, "workload": workload, "out_tok_per_s": speed, "errors": 0,
        "other_length": 0, "share": 1, "ttft_ms_p50": 100.0, "tpot_ms_p50": 10.0, **fields,
    }  # fmt: skip


def start_record(server: str, number: int, first_s: float) -> dict[str, object]:
    return {
        "kind": "start", "server": server, "round": number, "start_to_healthy_s": 1.0,
        "start_to_first_completion_s": first_s, "idle_rss_mib": 500.0,
    }  # fmt: skip


RECORDS = [
    start_record("peer", 1, 9.0),
    run_record("peer", 1, "c1", 50.0, ttft_ms_p50=300.0),
    run_record("peer", 1, "c4", 60.0, share=0.5),
    start_record("oneloop", 1, 3.0),
    run_record("oneloop", 1, "c1", 70.0),
    run_record("oneloop", 1, "c4", 90.0),
    run_record("oneloop", 2, "c1", 80.0),
    run_record("oneloop", 2, "c4", 100.0, errors=2),
    run_record("peer", 2, "c1", 40.0, ttft_ms_p50=300.0),
    {"kind": "failure", "server": "third", "round": 2, "error": "not healthy within 300 s"},
]


def test_the_markdown_table_has_workloads_as_rows_servers_as_columns_and_ratios():
    table = comparison_table(RECORDS, "oneloop")
    assert table.splitlines()[:4] == [
        "| output tokens per second | oneloop | peer | third |",
        "|---|---:|---:|---:|",
        "| c1 | 75.0 | 45.0 (1.67x) | - |",
        "| c4 | 95.0! | 60.0 (1.58x)† | - |",
    ]
    assert "| TTFT p50 at c1, ms | 100.0 | 300.0 (3.00x) | - |" in table
    assert "| start to first completion, s | 3.00 | 9.00 (3.00x) | - |" in table


def test_whatever_makes_a_cell_doubtful_is_said_below():
    notes = comparison_table(RECORDS, "oneloop").splitlines()[-4:]
    assert [note.strip() for note in notes[-3:]] == [
        "† a share of the requests only: not strictly comparable.",
        "! oneloop: 2 request(s) failed.",
        "! third: not healthy within 300 s",
    ]


def test_a_figure_nobody_took_has_no_row():
    assert "CPU while idle" not in comparison_table(RECORDS, "oneloop")


def test_the_summary_has_medians_spread_and_ratios():
    figures = comparison_summary(RECORDS, "oneloop")["figures"]
    assert figures["c1 out_tok_per_s"] == {
        "oneloop": {"median": 75.0, "min": 70.0, "max": 80.0, "ratio": 1.0},
        "peer": {"median": 45.0, "min": 40.0, "max": 50.0, "ratio": 1.667},
    }
    assert figures["start_to_first_completion_s"]["peer"]["ratio"] == 3.0


def test_nothing_at_all_makes_an_empty_table():
    assert "Medians of 0" in comparison_table([], "oneloop")
    assert comparison_summary([], "oneloop")["figures"] == {}


def test_the_table_command_prints_it_again_from_the_file(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    assert main(["table", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(comparison_table(RECORDS, "oneloop"))
    assert json.loads(out.splitlines()[-1])["rounds"] == 2


@pytest.mark.parametrize("text", ["{oops", '{"kind": "failure", "server": "peer", "round": 1, "error": "x"}'])
def test_the_table_command_refuses_a_file_it_cannot_use(tmp_path, capsys, text):
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    assert main(["table", str(path)]) == 2
    assert "loadtests table" in capsys.readouterr().err


SERVED = {
    "workload": "c1", "ok": 7, "requests": 8, "out_tok_per_s": 60.0, "req_per_s": 1.0, "ttft_ms_p50": 1.0, "ttft_ms_p90": 2.0,
    "ttft_ms_p99": 3.0, "tpot_ms_p50": None, "tpot_ms_p99": None, "itl_ms_p50": 5.0, "itl_ms_p99": 6.0, "e2e_ms_p50": 70.0,
    "e2e_ms_p99": 80.0, "in_tokens": 100, "cached_in_tokens": 25, "error_counts": {"HTTP 500: x": 1}, "other_length": 2,
    "tokens_from": "events", "client_cpu_share": 0.9, "send_late_ms_p99": 20.0,
}  # fmt: skip


def test_the_serve_table_counts_what_goes_in_where_nothing_comes_out():
    header, row = serve_table([SERVED | {"out_tokens": 0, "out_tok_per_s": 0.0, "in_tok_per_s": 321.0}]).splitlines()
    assert "out tok/s" not in header
    assert header.split()[2:4] == ["in", "tok/s"]
    assert row.split()[2] == "321.0"


def test_the_serve_table_shows_only_columns_that_were_measured():
    header, row = serve_table([SERVED]).splitlines()
    assert "TPOT" not in header
    assert "server us/tok" not in header
    assert row.split()[:3] == ["c1", "7/8", "60.0"]
    assert "25%" in row
    assert len(header) == len(row)


def test_remarks_tell_errors_and_every_reason_for_doubt():
    remarks = "\n".join(serve_remarks([SERVED]))
    for reason in ("1 x HTTP 500: x", "shorter or longer than requested", "no usage", "90% of a core", "20 ms late"):
        assert reason in remarks
