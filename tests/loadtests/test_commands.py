"""The commands from the outside, against toy servers that are real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.__main__ import main
from loadtests.address import Address
from loadtests.probe import bucket_percentile, is_healthy
from server.__main__ import main as server_main
from tests.loadtests.test_processes import free_port, toy, wait_healthy

ROOT = Path(__file__).parents[2]


def last_json(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, object]]:
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_serve_prints_a_table_and_a_last_line_of_json(served, capsys):
    url, pid = served
    args = ["--workload", "c1", "c2_8_5", "--num-requests", "3", "--goodput", "ttft:60000", "--pid", str(pid)]
    assert main(["serve", "--base-url", url, *args]) == 0
    out, summary = last_json(capsys)
    chat, ids = summary["runs"]
    assert "TTFT p50/p90/p99 ms" in out
    assert (summary["model"], chat["out_tokens"], ids["out_tokens"], chat["errors"]) == ("toy", 192, 15, 0)
    assert chat["goodput_req_per_s"] > 0
    assert chat["server_cpu_us_per_token"] >= 0
    assert chat["rss_mib"] > 0
    assert chat["loop_lag_ms_p99"] == 5.0


def test_serve_repeats_and_changes_workloads_by_its_options(served, capsys):
    args = ["--workload", "c4", "--repeat", "2", "--num-requests", "2", "--output-tokens", "3", "--rate", "1000"]
    assert main(["serve", "--base-url", served[0], *args]) == 0
    _, summary = last_json(capsys)
    assert [(run["out_tokens"], run["rate_per_s"]) for run in summary["runs"]] == [(6, 1000.0)] * 2


def test_embed_measures_texts_of_each_length(served, capsys):
    url, _ = served
    sizes = [
        "--words",
        "2",
        "5",
        "--texts",
        "7",
        "--batch",
        "3",
        "--concurrency",
        "2",
        "--singles",
        "4",
        "--rounds",
        "2",
    ]
    assert main(["embed", "--base-url", url, *sizes]) == 0
    out, summary = last_json(capsys)
    rows = summary["embeddings"]
    assert [(row["words"], row["tokens"], len(row["runs"])) for row in rows] == [(2, 3.0, 2), (5, 3.0, 2)]
    assert all(row["texts_per_s"] > 0 and row["single_ms_p50"] > 0 for row in rows)
    assert "one in" in out


@pytest.mark.parametrize(
    ("args", "reason"),
    [(["http://127.0.0.1:1"], "refused"), (["http://127.0.0.1:1", "--batch", "0"], "at least 1")],
)
def test_embed_says_what_cannot_be_measured(args, reason, capsys):
    assert main(["embed", "--base-url", *args]) == 2
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--base-url", "http://192.0.2.1:80"], "not a loopback"),
        (["--base-url", "http://127.0.0.1:1"], "Connection refused"),
        (["--base-url", "http://127.0.0.1:1", "--workload", "c99"], "no workload"),
        (["--base-url", "http://127.0.0.1:1", "--goodput", "x"], "METRIC:MILLISECONDS"),
        (["--base-url", "http://127.0.0.1:1", "--num-requests", "0"], "requests"),
        (["--base-url", "http://127.0.0.1:1", "--repeat", "0"], "--repeat"),
        (["--base-url", "http://127.0.0.1:1", "--concurrency", "0"], "at a time"),
        (["--base-url", "http://127.0.0.1:1", "--rate", "-1"], "must be positive"),
        (["--base-url", "http://127.0.0.1:1", "--trace-speed", "2"], "needs --trace"),
        (["--base-url", "http://127.0.0.1:1", "--clients", "0"], "--clients"),
        (["--base-url", "http://127.0.0.1:1", "--extra-body", "[]"], "--extra-body"),
        (["--base-url", "http://127.0.0.1:1", "--pid", "999999999"], "no such process"),
    ],
)
def test_serve_refuses_before_it_sends_anything(args, reason, capsys):
    assert main(["serve", *args]) == 2
    assert reason in capsys.readouterr().err


def test_serve_fails_when_requests_fail(tmp_path, capsys):
    process, address = toy(tmp_path, "broken")
    with process:
        wait_healthy(process, address)
        assert main(["serve", "--base-url", address.url, "--workload", "c4"]) == 1
    out, summary = last_json(capsys)
    assert "16 x HTTP 500: toy is broken" in out
    assert summary["runs"][0]["errors"] == 16


def test_a_key_is_taken_from_the_environment_where_openais_client_takes_it(served, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\n")
    assert main(["serve", "--base-url", served[0]]) == 2
    assert "API key" in capsys.readouterr().err


def test_the_servers_program_has_the_same_commands(served, capsys, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["oneloop", "bench", "serve", "--url", served[0], "--workload", "c1_8_5", "--num-prompts", "2"]
    )
    assert server_main() == 0
    assert last_json(capsys)[1]["runs"][0]["ok"] == 2


def servers_file(tmp_path: Path, **moods: str) -> Path:
    """One toy of each name and mood."""
    tables = []
    for name, mood in moods.items():
        port = free_port()
        command = json.dumps([sys.executable, "-m", "tests.loadtests.toy_server", str(port), *mood.split()])
        tables.append(f'[[server]]\nname = "{name}"\nport = {port}\ncommand = {command}\ncwd = "{ROOT}"\n')
    path = tmp_path / "servers.toml"
    path.write_text("\n".join(tables))
    return path


def compare(path: Path, tmp_path: Path, *args: str) -> int:
    common = [
        "--servers",
        str(path),
        "--out",
        str(tmp_path / "out.jsonl"),
        "--idle-seconds",
        "0",
        "--workload",
        "c2_8_5",
    ]
    return main(["compare", *common, *args])


def records_of(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_compare_goes_through_the_servers_and_back_again(tmp_path, capsys):
    path = servers_file(tmp_path, peer="", oneloop="")
    assert compare(path, tmp_path, "--rounds", "2") == 0
    out, summary = last_json(capsys)
    visits = [(record["round"], record["server"]) for record in records_of(tmp_path) if record["kind"] == "run"]
    assert visits == [(1, "peer"), (1, "oneloop"), (2, "oneloop"), (2, "peer")]
    assert out.startswith("| output tokens per second | oneloop | peer |")
    assert summary["ours"] == "oneloop"
    assert {"c2_8_5 out_tok_per_s", "start_to_healthy_s", "start_to_first_completion_s", "idle_rss_mib"} <= set(
        summary["figures"]
    )
    starts = [record for record in records_of(tmp_path) if record["kind"] == "start"]
    assert all(0 < start["start_to_healthy_s"] <= start["start_to_first_completion_s"] for start in starts)


def test_a_server_that_fails_is_noted_and_the_others_go_on(tmp_path, capsys):
    path = servers_file(tmp_path, dead="dies", faulty="broken", mortal="mortal", good="")
    assert compare(path, tmp_path) == 1
    out, summary = last_json(capsys)
    failures = {failure["server"]: failure["error"] for failure in summary["failures"]}
    assert "toy refuses to live" in failures["dead"]
    assert "HTTP 500: " in failures["faulty"]
    assert summary["errors"]["mortal"] == 12
    assert summary["errors"]["good"] == 0
    assert "! dead: ended before it was healthy" in out
    ports = [int(line.split("=")[1]) for line in path.read_text().splitlines() if line.startswith("port")]
    assert not any(is_healthy(Address("127.0.0.1", port), "/health") for port in ports)


def test_a_port_that_already_answers_is_not_mistaken_for_the_server(tmp_path, served, capsys):
    path = tmp_path / "servers.toml"
    path.write_text(f'[[server]]\nname = "a"\nbase_url = "{served[0]}"\ncommand = "sleep 600"')
    assert compare(path, tmp_path) == 1
    assert "already answers" in capsys.readouterr().out


def test_a_server_that_runs_already_is_measured_and_left_alone(tmp_path, served, capsys):
    path = tmp_path / "servers.toml"
    path.write_text(f'[[server]]\nname = "a"\nbase_url = "{served[0]}"\nshare = 0.5')
    assert compare(path, tmp_path) == 0
    assert records_of(tmp_path)[0]["requests"] == 6
    assert is_healthy(Address.parse(served[0]), "/health")


@pytest.mark.parametrize(
    ("args", "reason"),
    [(["--ours", "x"], "--ours x"), (["--only", "x"], "no server x"), (["--workload", "c99"], "no workload")],
)
def test_compare_refuses_before_it_starts_anything(tmp_path, capsys, args, reason):
    assert compare(servers_file(tmp_path, a=""), tmp_path, *args) == 2
    assert reason in capsys.readouterr().err


def test_help_needs_nothing_but_the_standard_library():
    code = "import sys; sys.path.insert(0, '.'); from loadtests.__main__ import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("serve", "steps", "gpu", "weights", "compare", "table", "results"):
        assert command in done.stdout


@pytest.mark.parametrize(("percent", "bound"), [(50, 0.001), (80, 0.001), (81, 0.005), (99, float("inf"))])
def test_the_lag_percentile_is_of_what_came_between_two_scrapes(percent, bound):
    before = {0.001: 10.0, 0.005: 10.0, float("inf"): 10.0}
    after = {0.001: 90.0, 0.005: 107.0, float("inf"): 110.0}
    assert bucket_percentile(before, after, percent) == bound
    assert bucket_percentile(after, after, percent) is None
    assert bucket_percentile({}, {}, percent) is None
