"""Command `oneloop bench sweep`: run one workload under rising load until throughput stops rising. Report the knee, and server
options that would improve it.

By default, the levels are 1, 2, 4, … streams (closed loop). With --rates, requests arrive at these rates, as a Poisson process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtests.arguments import Target, add_shape, add_target, shape_of
from loadtests.arrivals import Poisson
from loadtests.counters import counters, grown
from loadtests.knee import is_saturated, knee_of, suggestions
from loadtests.pictures import draw
from loadtests.report import serve_remarks, serve_table
from loadtests.saved import append_records, shape_of_run
from loadtests.serve import begin, run_workload
from loadtests.workloads import MAX_CONCURRENCY, Workload, find_workloads

SUMMARY = "raise the load until throughput stops rising; report the knee and helpful options"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workload", default="c1", metavar="NAME", help="as in serve (default c1: short chats)")
    loads = parser.add_mutually_exclusive_group()
    loads.add_argument("--concurrency", type=int, nargs="+", metavar="N", help="streams (default: 1 2 4 … 1024)")
    loads.add_argument("--rates", type=float, nargs="+", metavar="R", help="requests per second, instead of streams")
    add(
        "--requests-per-stream",
        type=int,
        default=4,
        metavar="N",
        help="requests per stream, at least 12 in all (default 4)",
    )
    add("--seconds", type=float, default=10.0, metavar="S", help="with --rates: seconds of each level (default 10)")
    add("--all", action="store_true", help="run all levels, even when throughput stops rising")
    add("--out", type=Path, metavar="JSONL", help="file to append levels to, for `plot`")
    add("--plot", type=Path, nargs="+", default=[], metavar="FILE", help="chart, .svg or .png; needs matplotlib")
    add_target(parser)
    add_shape(parser)


def levels_of(args: argparse.Namespace) -> Iterator[Workload]:
    """Yield the workload at each load level. Each level has different prompts. Raises ValueError."""
    [workload, *others] = find_workloads([args.workload], args.vocab_size)
    if others:
        raise ValueError(f"--workload {args.workload} is a group; a sweep needs one workload")
    if args.requests_per_stream < 1 or not args.seconds > 0:
        raise ValueError("--requests-per-stream and --seconds must be positive")
    shaped = replace(workload, **shape_of(args))
    if args.rates:
        return iter([at_rate(shaped, rate, args.seconds, index) for index, rate in enumerate(_rising(args.rates))])
    given = _rising(args.concurrency) if args.concurrency else [2**power for power in range(11)]
    return iter([_with_streams(shaped, num, args.requests_per_stream, index) for index, num in enumerate(given)])


def _rising(loads: Sequence[Any]) -> list[Any]:
    return sorted(dict.fromkeys(loads))


def _with_streams(workload: Workload, num: int, each: int, index: int) -> Workload:
    arrivals = max(num * each, -(-12 // workload.num_turns))
    return replace(workload, concurrency=num, num_requests=arrivals * workload.num_turns, arrivals=None).repeated(index)


def at_rate(workload: Workload, rate: float, seconds: float, index: int) -> Workload:
    """Return the workload with Poisson arrivals at `rate` requests per second for `seconds`. `index` selects the prompts."""
    arrivals = max(round(rate * seconds), -(-12 // workload.num_turns))
    return replace(
        workload, concurrency=MAX_CONCURRENCY, num_requests=arrivals * workload.num_turns, arrivals=Poisson(rate)
    ).repeated(index)


def run_level(target: Target, workload: Workload) -> dict[str, Any]:
    """Run one level. Return its record, with the increase of the server's counters."""
    before = counters(target.address)
    run, record = run_workload(
        target.address, workload, target.request_options, target.limits, target.slo, target.pid, target.clients
    )
    busy_s = sum(answer.e2e_s for answer in run.answers if answer.error is None)
    return {
        "kind": "level",
        "server": target.name,
        "load": record["rate_per_s"] or record["concurrency"],
        "in_flight_mean": round(busy_s / run.wall_s, 3) if run.wall_s else 0.0,
        **record,
        "counted": grown(before, counters(target.address)),
        **shape_of_run(run),
    }


def main(args: argparse.Namespace) -> int:
    """Run the sweep. Return 0 if it found a knee, 1 if no request was answered, 2 if nothing could begin."""
    begun = begin("sweep", args, levels_of)
    if begun is None:
        return 2
    workloads, target = begun
    print(f"{target.address.url}, model {target.request_options.model}, {args.workload}")
    levels: list[dict[str, Any]] = []
    why = None
    for workload in workloads:
        level = run_level(target, workload)
        levels.append(level)
        print(f"  {level['load']:g}: {level['out_tok_per_s']:.0f} tokens/s, {level['errors']} errors", file=sys.stderr)
        if args.out:
            append_records(args.out, [level])
        why = is_saturated(levels)
        if why is not None and not args.all:
            break
    return _tell(args, levels, why)


def _tell(args: argparse.Namespace, levels: Sequence[dict[str, Any]], why: str | None) -> int:
    print("\n".join([serve_table(levels), *dict.fromkeys(serve_remarks(levels))]))
    if why is not None:
        print(f"ended: {why}")
    knee, options = knee_of(levels), suggestions(levels)
    if knee is not None:
        print(f"knee (best throughput for its latency): {_figures(knee)}")
        best = max((level for level in levels if level["ok"]), key=lambda level: level["out_tok_per_s"])
        if best is not knee:
            print(f"highest throughput: {_figures(best)}")
    nothing = (
        "no option: no request was answered"
        if knee is None
        else "no option: no counter of the server shows a bottleneck"
    )
    print("\n".join(f"suggested: {option}" for option in options or [nothing]))
    for path in args.plot:
        draw(path, levels)
    shown = [{name: value for name, value in each.items() if name not in ("cdf", "timeline")} for each in levels]
    print(
        json.dumps(
            {"command": "sweep", "levels": shown, "knee": knee and knee["load"], "ended": why, "suggested": options}
        ),
        flush=True,
    )
    return 0 if knee is not None else 1


def _figures(level: Mapping[str, Any]) -> str:
    """Return load, throughput and p50 latencies of a level as text."""
    unit = "requests/s" if level["rate_per_s"] else "streams"
    ttft_ms, tpot_ms = level["ttft_ms_p50"] or 0, level["tpot_ms_p50"] or 0
    speed = f"{level['out_tok_per_s']:.0f} tokens/s"
    return f"{level['load']:g} {unit}, {speed}, TTFT {ttft_ms:.0f} ms, TPOT {tpot_ms:.1f} ms (p50)"
