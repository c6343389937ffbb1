"""Command `python -m loadtests compare`: run the same workloads against several servers. One server runs at a time.

In each round, every server is started, measured and stopped. Measured are the time to healthy and to the first completion,
memory and CPU while idle, and the workloads. Every second round visits the servers in reverse, so a machine that slows down
favours none. Each figure is written to --out immediately. A server that fails becomes a record and a note under the table, and
the comparison continues without it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests import processes
from loadtests.load import Limits
from loadtests.probe import ProbeFailed, ask, complete_once, first_model, is_healthy
from loadtests.processes import CannotStart, ServerProcess
from loadtests.report import comparison_summary, comparison_table
from loadtests.serve import run_workload
from loadtests.servers import Server, read_servers
from loadtests.workloads import Workload, find_workloads

SUMMARY = "start several servers, measure each, print the README's table"
_POLL_S = 0.02


class ServerFailed(Exception):
    """Error: a server did not start, did not become healthy, or did not return a first completion."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--servers", type=Path, required=True, metavar="TOML", help="see loadtests/servers.example.toml")
    add("--only", nargs="+", default=[], metavar="NAME", help="names of servers in the file (default: all)")
    add("--ours", metavar="NAME", help="server that ratios refer to (default: oneloop if present, else the first)")
    add("--workload", nargs="+", default=["cpu"], metavar="NAME", help="as in serve")
    add("--rounds", type=int, default=1, metavar="N", help="rounds over all servers (default 1)")
    add("--out", type=Path, metavar="JSONL", help="file to which every figure is appended")
    add("--logs", type=Path, metavar="DIR", help="servers' output (default: next to --out, or ./loadtest-logs)")
    add("--idle-seconds", type=float, default=2.0, metavar="S", help="seconds of measuring idle CPU use (default 2)")
    add("--vocab-size", type=int, default=49_152, metavar="N", help="vocabulary of random ids (default 49152)")
    add("--timeout", type=float, default=300, metavar="S", help="time limit of a request (default 300)")
    add("--max-seconds", type=float, default=540, metavar="S", help="time limit of a run (default 540)")


@dataclass(frozen=True, slots=True)
class Visit:
    """Measurement of one server in one round. `emit`: receives each record."""

    workloads: Sequence[Workload]
    limits: Limits
    logs: Path
    idle_s: float
    emit: Callable[[dict[str, Any]], None]

    def __call__(self, server: Server) -> None:
        """Start the server, measure it and always stop it. Raises ServerFailed."""
        if not server.command:
            if not is_healthy(server.address, server.health):
                raise ServerFailed(
                    f"nothing healthy at {server.address.url}{server.health}, and no command to start it"
                )
            self._run_all(server, None)
            return
        if _answers(server):
            raise ServerFailed(f"something already answers on {server.address.url}")
        log = self.logs / (_file_name(server.name) + ".log")
        try:
            with ServerProcess(server.command, log, server.env, server.cwd) as process:
                healthy_s = wait_until_healthy(server, process)
                try:
                    complete_once(server.address, _model(server), server.start_limit_s)
                except ProbeFailed as error:
                    raise ServerFailed(str(error)) from None
                self._note_start(process, healthy_s, process.age_s)
                self._run_all(server, process)
        except CannotStart as error:
            raise ServerFailed(str(error)) from None

    def _note_start(self, process: ServerProcess, healthy_s: float, completed_s: float) -> None:
        record: dict[str, Any] = {
            "kind": "start",
            "start_to_healthy_s": round(healthy_s, 3),
            "start_to_first_completion_s": round(completed_s, 3),
            "idle_rss_mib": round(processes.resident_mib(process.pid), 1),
            "num_processes": len(processes.family(process.pid)),
        }
        if self.idle_s > 0:
            record["idle_cpu_percent"] = processes.cpu_percent(process.pid, self.idle_s)
        self.emit(record)

    def _run_all(self, server: Server, process: ServerProcess | None) -> None:
        pid = process.pid if process else None
        for workload in self.workloads:
            if not server.takes(workload.name):
                continue
            if process is not None and process.has_ended():
                raise ServerFailed(f"ended before {workload.name}: {process.log_tail()}")
            request_options = server.request_options(_model(server))
            _, record = run_workload(
                server.address, workload.scaled(server.share), request_options, self.limits, pid=pid
            )
            self.emit({"kind": "run", "share": server.share, **record})


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


def _answers(server: Server) -> bool:
    try:
        ask(server.address, server.health, timeout_s=1.0)
    except ProbeFailed as error:
        return not isinstance(error.__cause__, ConnectionRefusedError)
    return True


def wait_until_healthy(server: Server, process: ServerProcess) -> float:
    """Wait until the server is healthy; return the seconds since its start. Raises ServerFailed."""
    while process.age_s < server.start_limit_s:
        if is_healthy(server.address, server.health):
            return process.age_s
        if process.has_ended():
            raise ServerFailed(f"ended before it was healthy: {process.log_tail()}")
        time.sleep(_POLL_S)
    raise ServerFailed(f"not healthy within {server.start_limit_s:g} s: {process.log_tail()}")


def _model(server: Server) -> str:
    try:
        return server.model or first_model(server.address)
    except ProbeFailed as error:
        raise ServerFailed(str(error)) from None


class Ledger:
    """Records of a comparison. Each new record is kept, appended to the file, and printed as one line."""

    def __init__(self, out: Path | None) -> None:
        self.records: list[dict[str, Any]] = []
        self._out = out

    def enter(self, server: str, round_number: int, record: dict[str, Any]) -> None:
        record = {"server": server, "round": round_number, **record}
        self.records.append(record)
        if self._out is not None:
            with self._out.open("a") as out:
                out.write(json.dumps(record) + "\n")
        print(f"round {round_number} {server}: {_tell(record)}", file=sys.stderr, flush=True)


def _tell(record: dict[str, Any]) -> str:
    if record["kind"] == "failure":
        return f"FAILED: {record['error']}"
    if record["kind"] == "start":
        return f"first completion after {record['start_to_first_completion_s']} s, {record['idle_rss_mib']} MiB"
    return f"{record['workload']} {record['out_tok_per_s']} tok/s, {record['errors']} errors"


def run_rounds(servers: Sequence[Server], rounds: int, visit: Callable[[Server, int], None], ledger: Ledger) -> None:
    for number in range(1, rounds + 1):
        for server in servers if number % 2 else reversed(servers):
            try:
                visit(server, number)
            except ServerFailed as failure:
                ledger.enter(server.name, number, {"kind": "failure", "error": str(failure)})


def ours_of(servers: Sequence[Server], requested: str | None) -> str:
    """Return the name of the server with which the others are compared. Raises ValueError."""
    names = [server.name for server in servers]
    if requested is not None and requested not in names:
        raise ValueError(f"--ours {requested}: not among {', '.join(names)}")
    return requested or ("oneloop" if "oneloop" in names else names[0])


def main(args: argparse.Namespace) -> int:
    """Run the comparison. Return 0 if every server started and every answer was complete, 2 if nothing could begin, 130 after
    Ctrl-C."""
    try:
        servers = read_servers(args.servers, args.only)
        workloads = find_workloads(args.workload, args.vocab_size)
        ours = ours_of(servers, args.ours)
        logs = args.logs or (args.out.with_suffix(".logs") if args.out else Path("loadtest-logs"))
        logs.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(args.out)
        if args.out:
            args.out.touch()
    except (ValueError, OSError) as error:
        print(f"loadtests compare: {error}", file=sys.stderr)
        return 2
    limits = Limits(args.timeout, args.max_seconds)

    def visit(server: Server, number: int) -> None:
        Visit(workloads, limits, logs, args.idle_seconds, lambda record: ledger.enter(server.name, number, record))(
            server
        )

    try:
        with processes.stop_signals_as_interrupt():
            run_rounds(servers, args.rounds, visit, ledger)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    print(comparison_table(ledger.records, ours))
    summary = comparison_summary(ledger.records, ours) | {"command": "compare", "interrupted": interrupted}
    print("\n" + json.dumps(summary), flush=True)
    if interrupted:
        return 130
    return 1 if summary["failures"] or any(summary["errors"].values()) else 0
