"""Command `oneloop bench flat`: thousands of requests with different lengths, to see whether the server's memory stays flat.

Data that a server keeps by length (buffers, graphs, traces, plans) grows until all lengths have come; a leak grows for ever.
Memory is read after each of a hundred parts. The first third may fill caches; a line through the rest is the verdict."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from loadtests import processes
from loadtests.address import Address, AddressRefused
from loadtests.answers import read_answer
from loadtests.clock import WallClock
from loadtests.conversations import body_of
from loadtests.exchange import post_request
from loadtests.load import Limits, Load
from loadtests.probe import ProbeFailed, first_model

SUMMARY = "many requests of distinct lengths: does memory stay flat?"
NUM_PARTS = 100
WARM_UP = 1 / 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", "--url", default="http://127.0.0.1:8000", metavar="URL", help="a server on this machine")
    add("--pid", type=int, required=True, help="its process, whose memory is looked at")
    add("--model", help="model name in requests (default: the first of /v1/models)")
    add("--num-requests", type=int, default=20_000, metavar="N", help="(default 20000)")
    add("--max-prompt-tokens", type=int, default=1000, metavar="N", help="longest prompt (default 1000)")
    add("--vocab-size", type=int, default=49_152, metavar="N", help="for prompts of random ids (default 49152)")
    add("--concurrency", type=int, default=16, metavar="N", help="streams (default 16)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and of their order")
    add("--max-growth-mib", type=float, default=16.0, help="over the last two thirds (default 16)")


def distinct_lengths(count: int, longest: int, rng: random.Random) -> list[tuple[int, int]]:
    """Tokens of prompt and of answer, no two pairs the same, in any order; answers as short as that allows."""
    pairs = [(1 + index % longest, 1 + index // longest) for index in range(count)]
    rng.shuffle(pairs)
    return pairs


def slope_mib(seen: Sequence[tuple[int, float]]) -> float:
    """MiB by 1,000 requests behind the warm-up. `seen`: requests so far, and MiB."""
    settled = seen[int(WARM_UP * len(seen)) :]
    line = statistics.linear_regression([num for num, _ in settled], [mib for _, mib in settled])
    return 1000 * line.slope


def send(address: Address, model: str, args: argparse.Namespace) -> tuple[list[tuple[int, float]], list[str]]:
    """Requests so far and MiB, after each part; and what failed."""
    rng, ids = random.Random(args.seed), range(100, args.vocab_size)
    pairs = distinct_lengths(args.num_requests, args.max_prompt_tokens, rng)
    seen, failures = [(0, processes.resident_mib(args.pid))], []
    size = -(-len(pairs) // NUM_PARTS)
    for at in range(0, len(pairs), size):
        fields = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True}
        requests = [
            post_request(
                address,
                "/v1/completions",
                body_of(fields | {"prompt": rng.choices(ids, k=prompt), "max_tokens": output}),
            )
            for prompt, output in pairs[at : at + size]
        ]
        load = Load(address, Limits(run_s=3600), WallClock())
        asyncio.run(load.run(requests, args.concurrency))
        answers = [read_answer(recording, "completions") for recording in load.recordings]
        # A model that draws special tokens only has said nothing, and answered all the same.
        failures += [answer.error for answer in answers if answer.error not in (None, "no content")]
        seen.append((at + len(requests), processes.resident_mib(args.pid)))
        print(f"\r  {seen[-1][0]}/{len(pairs)} requests, {seen[-1][1]:.1f} MiB", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seen, failures


def main(args: argparse.Namespace) -> int:
    """0 where memory stayed flat and every request was answered; 2 when it could not begin."""
    try:
        if args.num_requests < NUM_PARTS or args.max_prompt_tokens < 1 or args.concurrency < 1 or args.vocab_size < 101:
            raise ValueError(f"at least {NUM_PARTS} requests, one token, one stream, and ids above 100")
        if processes.read_stat(args.pid) is None:
            raise ValueError(f"--pid {args.pid}: no such process")
        address = Address.parse(args.base_url)
        model = args.model or first_model(address)
    except (AddressRefused, ProbeFailed, ValueError) as error:
        print(f"bench flat: {error}", file=sys.stderr)
        return 2
    seen, failures = send(address, model, args)
    slope = slope_mib(seen)
    growth = slope * (1 - WARM_UP) * args.num_requests / 1000
    report: dict[str, Any] = {
        "command": "flat", "requests": args.num_requests, "failures": len(failures), "first_failure": next(iter(failures), None),
        "rss_mib": [round(mib, 1) for _, mib in seen[:: max(1, len(seen) // 10)]],
        "peak_rss_mib": round(processes.peak_resident_mib(args.pid), 1),
        "slope_mib_per_1000_requests": round(slope, 4), "growth_mib": round(growth, 2),
    }  # fmt: skip
    print(f"memory: {slope:+.3f} MiB by 1,000 requests behind the first third, {growth:+.1f} MiB in all")
    print(json.dumps(report), flush=True)
    return 1 if failures or growth > args.max_growth_mib else 0
