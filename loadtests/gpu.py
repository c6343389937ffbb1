"""Command `python -m loadtests gpu`: measure all HTTP figures and costs in `targets.py` in one run of our server.

A model folder is written from a shape (its config.json with the tokenizer's vocabulary; random weights). The server starts
twice: with empty kernel caches (the variables of --cache-env point to new folders), then with the caches of the first start. The
second start is measured: idle CPU, memory, the workloads, and with --ladder Poisson arrivals at shares of a workload's rate.
`--starts N` then starts the server N more times and sends each the same request. Options after `--` go to the server."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests import processes
from loadtests.compare import ServerFailed, wait_until_healthy
from loadtests.load import Limits
from loadtests.made_tokenizer import check_size, write_tokenizer
from loadtests.probe import ProbeFailed
from loadtests.processes import CannotStart, ServerProcess
from loadtests.report import serve_remarks, serve_table
from loadtests.results import add_to_file, figures_table, new_record
from loadtests.serve import run_workload
from loadtests.servers import Server
from loadtests.swaps import complete
from loadtests.sweep import at_rate
from loadtests.workloads import Workload, find_workloads

SUMMARY = "start our server with dummy weights and measure it (the HTTP rows of the GPU)"
NAME = "m"  # of the model in requests
OPTIONS = ["--load-format", "dummy", "--max-model-len", "16384", "--max-num-seqs", "512", "--dtype", "bfloat16"]
CACHES = ["TRITON_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH"]
TIMES = tuple(f"{name}_ms_p{percent}" for name in ("ttft", "tpot", "itl", "e2e") for percent in (50, 99))
WANTED = ("wall_s", "req_per_s", "out_tok_per_s", *TIMES, "server_cpu_us_per_token", "loop_lag_ms_p99")
SHARES = [50, 70, 90, 110]  # of saturation, percent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model-shape",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder whose config.json gives the model's shape",
    )
    add("--tokenizer", type=Path, metavar="PATH", help="folder or .gguf file (default: a generated tokenizer)")
    add(
        "--workload",
        nargs="*",
        default=["gpu"],
        metavar="NAME",
        help="workloads, as in serve (default gpu: those of RESULTS.md; no name: none)",
    )
    add(
        "--ladder",
        metavar="NAME",
        help="workload to repeat with Poisson arrivals at shares of its measured rate",
    )
    add(
        "--shares",
        type=int,
        nargs="+",
        default=SHARES,
        metavar="PERCENT",
        help="shares of the rate for --ladder (default 50 70 90 110)",
    )
    add(
        "--ladder-seconds",
        type=float,
        default=12.0,
        metavar="S",
        help="duration of arrivals at each share (default 12)",
    )
    add("--begin-within", type=float, metavar="S", help="start no workload later than S seconds after the command")
    add(
        "--vocab-size",
        type=int,
        default=49_152,
        metavar="N",
        help="vocabulary size of the generated model (default 49152)",
    )
    add(
        "--cache-env",
        nargs="*",
        default=CACHES,
        metavar="NAME",
        help=f"environment variables of kernel caches: {' '.join(CACHES)}",
    )
    add("--no-cold", action="store_true", help="skip the start with empty kernel caches")
    add("--idle-seconds", type=float, default=5.0, metavar="S", help="seconds of measuring idle CPU use (default 5)")
    add(
        "--starts",
        type=int,
        default=0,
        metavar="N",
        help="then start the server N times, and compare one answer of each",
    )
    add("--clients", type=int, metavar="N", help="client processes, as in serve")
    add(
        "--start-limit",
        type=float,
        default=300.0,
        metavar="S",
        help="time limit until /health returns 200 (default 300)",
    )
    add(
        "--logs",
        type=Path,
        default=Path("loadtest-logs"),
        metavar="DIR",
        help="folder for server logs (default ./loadtest-logs)",
    )
    add("--output-json", type=Path, metavar="JSONL", help="file to which the result is appended")
    add(
        "server_options",
        nargs="*",
        metavar="-- OPTION",
        help="after --: options of the server, such as --enforce-eager",
    )


def write_model(shape: Path, vocab_size: int, folder: Path) -> None:
    """Write a model folder without weights, with the config in `shape` and a vocabulary of `vocab_size`. Raises OSError,
    ValueError."""
    config = json.loads((shape / "config.json").read_text())
    config["vocab_size"] = vocab_size
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def our_server(args: argparse.Namespace, model: Path, tokenizer: Path, env: Mapping[str, str]) -> Server:
    """Return our server on a free port. Its options are those of the benchmark, then those of the user."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "oneloop", "--model", str(model), "--tokenizer", str(tokenizer), "--port", str(port),
        "--served-model-name", NAME, *OPTIONS, *args.server_options,
    ]  # fmt: skip
    return Server("oneloop", port=port, command=command, env=dict(env), start_limit_s=args.start_limit, model=NAME)


class Session:
    """Measurement of our server: its starts, and the workloads on one of them."""

    def __init__(self, args: argparse.Namespace, workloads: Sequence[Workload]) -> None:
        self._args, self._workloads = args, workloads
        self.figures: dict[str, float] = {}
        self.runs: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self._begun_s = time.monotonic()

    def run(self, folder: Path) -> None:
        """Start and measure the server. Raises ServerFailed, CannotStart, OSError, ValueError."""
        args = self._args
        write_model(args.model_shape, args.vocab_size, model := folder / args.model_shape.resolve().name)
        if (tokenizer := args.tokenizer) is None:
            write_tokenizer(tokenizer := folder / "tokenizer", args.vocab_size)
        args.logs.mkdir(parents=True, exist_ok=True)
        env = {} if args.no_cold else {name: str(folder / "caches" / name) for name in args.cache_env}
        for path in env.values():
            Path(path).mkdir(parents=True)
        if not args.no_cold:
            server = our_server(args, model, tokenizer, env)
            with ServerProcess(server.command, args.logs / "gpu-cold.log", env) as process:
                self._note("start_cold_s", wait_until_healthy(server, process))
        server = our_server(args, model, tokenizer, env)
        with ServerProcess(server.command, args.logs / "gpu.log", env) as process:
            self._note("start_warm_s", wait_until_healthy(server, process))
            self._measure(server, process)
        if args.starts:
            self._start_again(server, env)

    def _start_again(self, server: Server, env: Mapping[str, str]) -> None:
        """Start the server `--starts` times, one after another. Each server answers the same greedy request of 16 tokens."""
        took_s, answers, failures = list[float](), set[str](), list[str]()
        for number in range(self._args.starts):
            log = self._args.logs / f"gpu-start-{number}.log"
            try:
                with ServerProcess(server.command, log, env) as process:
                    took_s.append(wait_until_healthy(server, process))
                    print(f"  start {number + 1}: {took_s[-1]:.2f} s", file=sys.stderr, flush=True)
                    answer = complete(server.address, NAME, 16)
                    failures += [answer.failure] if answer.failure is not None else []
                    answers.add(answer.text)
            except (ServerFailed, ProbeFailed) as error:
                failures.append(str(error))
                print(f"  start {number + 1} failed: {error}", file=sys.stderr, flush=True)
        self.facts["start_failures"] = failures
        self._note("starts.failed", len(failures))
        self._note("starts.distinct_answers", len(answers))
        if took_s:
            self._note("starts.s_p50", statistics.median(took_s))
            self._note("starts.s_max", max(took_s))

    def _measure(self, server: Server, process: ServerProcess) -> None:
        pid = process.pid
        self.facts["num_processes"] = len(processes.family(pid))
        resident_mib = [processes.resident_mib(pid)]
        self._note("idle_cpu_percent", processes.cpu_percent(pid, self._args.idle_seconds))
        for title, workload in self._all_workloads():
            if process.has_ended():
                raise ServerFailed(f"ended before {title}: {process.log_tail()}")
            limit_s = self._args.begin_within
            if limit_s is not None and time.monotonic() - self._begun_s > limit_s:
                self.facts.setdefault("left_out", []).append(title)
                continue
            request_options, clients = server.request_options(NAME), self._args.clients
            _, record = run_workload(server.address, workload, request_options, Limits(), pid=pid, clients=clients)
            self.runs.append(record | {"workload": title})
            resident_mib.append(processes.resident_mib(pid))
            if record["errors"] == 0:
                for key in WANTED:
                    if record.get(key) is not None:
                        self._note(f"{title}.{key}", record[key])
        self._note("host_memory_gib", max(resident_mib) / 1024)
        self.facts["peak_host_memory_gib"] = round(processes.peak_resident_mib(pid) / 1024, 3)

    def _all_workloads(self) -> Iterator[tuple[str, Workload]]:
        """Yield the requested workloads, then the steps of the ladder, whose rates depend on the measured rate of a workload."""
        yield from ((workload.name, workload) for workload in self._workloads)
        for workload in self._workloads:
            rate = self.figures.get(f"{workload.name}.req_per_s")
            if workload.name == self._args.ladder and rate is not None:
                for number, share in enumerate(self._args.shares, 1):
                    step = at_rate(workload, rate * share / 100, self._args.ladder_seconds, number)
                    yield f"{workload.name}@{share}%", step

    def _note(self, key: str, value: float) -> None:
        self.figures[key] = value
        print(f"  {key}: {value:g}", file=sys.stderr, flush=True)


def machine() -> str:
    """Return the GPU's name as nvidia-smi reports it, or without a GPU the number of cores."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.splitlines()[0].strip()
    return f"{len(os.sched_getaffinity(0))} CPU cores"


def main(args: argparse.Namespace) -> int:
    """Run the measurement. Return 0 if each start succeeded and every answer was complete, 2 if nothing could begin."""
    try:
        workloads = find_workloads(args.workload, args.vocab_size)
        if args.ladder is not None and args.ladder not in {workload.name for workload in workloads}:
            raise ValueError(f"--ladder {args.ladder} must be one of the measured workloads")
        if args.tokenizer is None:
            check_size(args.vocab_size)
        elif not args.tokenizer.exists():
            raise ValueError(f"--tokenizer {args.tokenizer}: no such file or folder")
        if args.clients is not None and args.clients < 1:
            raise ValueError("--clients must be at least 1")
    except ValueError as error:
        print(f"loadtests gpu: {error}", file=sys.stderr)
        return 2
    session, failure = Session(args, workloads), None
    try:
        with processes.stop_signals_as_interrupt(), tempfile.TemporaryDirectory(prefix="oneloop-gpu-") as folder:
            session.run(Path(folder))
    except (ServerFailed, CannotStart, OSError, ValueError) as error:
        failure = str(error)
        print(f"loadtests gpu: {failure}", file=sys.stderr)
    name = args.model_shape.resolve().name
    result = new_record("gpu", name, machine(), session.figures) | session.facts
    result |= {"runs": session.runs, "failure": failure}
    if session.runs:
        print("\n".join([serve_table(session.runs), *serve_remarks(session.runs), ""]))
    print(figures_table(name, result["figures"]))
    if args.output_json is not None:
        add_to_file(args.output_json, result)
    print("\n" + json.dumps(result), flush=True)
    failed = failure or session.figures.get("starts.failed") or any(record["errors"] for record in session.runs)
    return 1 if failed else 0
