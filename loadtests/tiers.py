"""Command `python -m loadtests tiers`: measure KV tiers of our server with dummy weights.

The server starts four times with the same small KV cache of --pool-tokens:

1. without tiers: conversations whose KV exceeds the cache;
2. with --kv-host-bytes: TTFT of a long prompt computed, from the device and from the host, then the same conversations;
3. with --kv-disk: the long prompts are computed again and written;
4. restarted: TTFT of the long prompts from the disk. Before, their files are dropped from the page cache.

Rates of copies are server metrics; `loadtests.engine.bus` measures plain copies. Options after `--` go to our server."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtests import processes
from loadtests.address import Address
from loadtests.applications import TurnsPrompt
from loadtests.compare import ServerFailed, wait_until_healthy
from loadtests.gpu import NAME, machine, our_server, write_model
from loadtests.lengths import Lengths
from loadtests.load import Limits, RequestOptions
from loadtests.made_tokenizer import check_size, write_tokenizer
from loadtests.probe import ProbeFailed, ask
from loadtests.processes import CannotStart, ServerProcess
from loadtests.report import serve_remarks, serve_table
from loadtests.results import add_to_file, figures_table, new_record
from loadtests.serve import run_workload
from loadtests.workloads import TokenPrompt, Workload

SUMMARY = "measure KV tiers: long prompts from host and disk, conversations that exceed the KV cache"
BLOCK_TOKENS = 16
ROOM_TOKENS = 1024  # of the context, beside the long prompt
EVICTING_SEED = 1_000  # of prompts that push others out of the device
SETTLED_S = 1.5  # without a copied byte: one copy takes less
MIN_CACHED_SHARE = 0.9  # of a prompt that counts as a hit
FROM_RUN = ("out_tok_per_s", "ttft_ms_p50", "ttft_ms_p99", "wall_s", "cached_in_tokens")
_TRANSFER = re.compile(r'^\w+:kv_offload_total_(bytes|time)\w*\{[^}]*transfer_type="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model-shape",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder whose config.json gives the model's shape",
    )
    add("--prompt-tokens", type=int, default=32_768, metavar="N", help="tokens of the long prompt (default 32768)")
    add("--pool-tokens", type=int, default=45_056, metavar="N", help="tokens in the KV cache (default 45056)")
    add("--rounds", type=int, default=3, metavar="N", help="long prompts, each with new ids (default 3)")
    add("--conversations", type=int, default=64, metavar="N", help="conversations at a time (default 64)")
    add("--turns", type=int, default=8, metavar="N", help="turns of each conversation (default 8)")
    add("--words", type=int, default=150, metavar="N", help="words of each turn, about two tokens each (default 150)")
    add("--output-tokens", type=int, default=32, metavar="N", help="output tokens of each turn (default 32)")
    add("--host-bytes", default="64GiB", metavar="SIZE", help="--kv-host-bytes of the server (default 64GiB)")
    add(
        "--disk", type=Path, metavar="DIR", help="where the disk tier's folder is created (default: as temporary files)"
    )
    add(
        "--vocab-size",
        type=int,
        default=49_152,
        metavar="N",
        help="vocabulary size of the generated model (default 49152)",
    )
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
    add("server_options", nargs="*", metavar="-- OPTION", help="after --: options of the server, such as --device cpu")


class Session:
    """Measurement of one model shape. Raises ServerFailed, ProbeFailed, CannotStart and OSError."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._model, self._tokenizer = folder / args.model_shape.resolve().name, folder / "tokenizer"
        self.figures: dict[str, float] = {}
        self.runs: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def run(self) -> None:
        args = self._args
        write_model(args.model_shape, args.vocab_size, self._model)
        write_tokenizer(self._tokenizer, args.vocab_size)
        args.logs.mkdir(parents=True, exist_ok=True)
        self._measure_bus()
        with self._server("plain") as address:
            self._converse(address, "plain")
        with self._server("host", "--kv-host-bytes", args.host_bytes) as address:
            self._long_prompts(address)
            self._converse(address, "host")
            self._note_rates(address)
        for name in ("out_tok_per_s", "ttft_ms_p50", "ttft_ms_p99"):
            ratio = self.figures[f"conversations.host.{name}"] / self.figures[f"conversations.plain.{name}"]
            self._note(f"conversations.host_to_plain.{name}", ratio)
        with tempfile.TemporaryDirectory(prefix="oneloop-kv-", dir=args.disk) as disk:
            self._from_disk(Path(disk))

    def _measure_bus(self) -> None:
        device = [value for name, value in pairwise(self._args.server_options) if name == "--device"]
        command = [sys.executable, "-m", "loadtests.engine.bus", *(["--device", device[-1]] if device else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.problems.append(f"loadtests.engine.bus failed: {done.stderr[-300:]}")
            return
        found = json.loads(done.stdout)
        for name in ("to_host", "to_device"):
            self._note(f"gb_per_s.plain_copies_{name}", found[name])

    @contextlib.contextmanager
    def _server(self, name: str, *options: str) -> Iterator[Address]:
        args = self._args
        sizes = {
            "--max-model-len": args.prompt_tokens + ROOM_TOKENS,
            "--num-kv-blocks": -(-args.pool_tokens // BLOCK_TOKENS),
        }
        ours = [str(each) for pair in sizes.items() for each in pair]
        given = argparse.Namespace(**vars(args) | {"server_options": [*ours, *options, *args.server_options]})
        server = our_server(given, self._model, self._tokenizer, {})
        with ServerProcess(server.command, args.logs / f"tiers-{name}.log") as process:
            self._note(f"start_s.{name}", wait_until_healthy(server, process))
            yield server.address

    def _converse(self, address: Address, name: str) -> None:
        args = self._args
        workload = Workload(
            f"conversations.{name}", TurnsPrompt(Lengths(args.words, args.words), args.turns), args.conversations,
            args.conversations * args.turns, Lengths(args.output_tokens, args.output_tokens), seed=1, num_warmup=1,
        )  # fmt: skip
        run, record = run_workload(address, workload, RequestOptions(NAME), Limits())
        self.runs.append(record)
        if record["errors"]:
            self.problems.append(f"{workload.name}: {record['error_counts']}")
        for key in FROM_RUN:
            self._note(f"conversations.{name}.{key}", record[key])
        last_turns = sorted(each.num_prompt_tokens + each.num_output_tokens for each in run.answers)[
            -args.conversations :
        ]
        self._note("conversations.tokens_to_pool", sum(last_turns) / args.pool_tokens)

    def _long_prompts(self, address: Address) -> None:
        """Measure long prompts that are computed, then reused from the device, then reused from the host after eviction."""
        num_evicting = -(-self._args.pool_tokens // self._args.prompt_tokens)
        evicting = range(EVICTING_SEED, EVICTING_SEED + num_evicting * (self._args.rounds + 1))
        seeds = iter(evicting)
        self._ask(address, seeds=[next(seeds) for _ in range(num_evicting)])  # kernels are warm then
        found: dict[str, list[float]] = {"computed": [], "device": [], "host": []}
        for seed in range(self._args.rounds):
            found["computed"] += self._ask(address, seeds=[seed], is_hit=False)
            found["device"] += self._ask(address, seeds=[seed], is_hit=True)
            wait_for_copies(address)
            self._ask(address, seeds=[next(seeds) for _ in range(num_evicting)])
            wait_for_copies(address)
            found["host"] += self._ask(address, seeds=[seed], is_hit=True)
        for source, ttft_ms in found.items():
            self._note(f"ttft_ms.{source}", statistics.median(ttft_ms))

    def _from_disk(self, disk: Path) -> None:
        """Measure the long prompts after a restart, when they are on disk only."""
        options = "--kv-disk", str(disk)
        seeds = range(self._args.rounds)
        with self._server("disk", *options) as address:
            for seed in seeds:
                self._ask(address, seeds=[seed], is_hit=False)
                wait_for_copies(address)
            self._note_rates(address, "CPU_to_disk")
        drop_from_page_cache(disk)
        with self._server("restarted", *options) as address:
            self._ask(address, seeds=[EVICTING_SEED])
            ttft_ms = [each for seed in seeds for each in self._ask(address, seeds=[seed], is_hit=True)]
            self._note_rates(address, "disk_to_CPU")
        self._note("ttft_ms.disk", statistics.median(ttft_ms))
        for source in ("device", "computed"):
            self._note(f"ttft.disk_to_{source}", self.figures["ttft_ms.disk"] / self.figures[f"ttft_ms.{source}"])

    def _ask(self, address: Address, *, seeds: Sequence[int], is_hit: bool | None = None) -> list[float]:
        """Request one token after each long prompt. Return TTFTs in ms. `is_hit` False: the prompt must not be cached."""
        found = []
        for seed in seeds:
            length = Lengths(self._args.prompt_tokens, self._args.prompt_tokens)
            prompt = TokenPrompt(length, vocab_size=self._args.vocab_size)
            one = Workload(f"prompt {seed}", prompt, 1, 1, Lengths(1, 1), seed=seed, endpoint="completions")
            _, record = run_workload(address, one, RequestOptions(NAME), Limits())
            if record["errors"]:
                raise ProbeFailed(f"{one.name}: {record['error_counts']}")
            cached_share = record["cached_in_tokens"] / self._args.prompt_tokens
            if is_hit is not None and (cached_share >= MIN_CACHED_SHARE) != is_hit:
                self.problems.append(f"{one.name}: {cached_share:.0%} of it was cached")
            found.append(float(record["ttft_ms_p50"]))
        return found

    def _note_rates(self, address: Address, *directions: str) -> None:
        for direction, (num_bytes, took_s) in transfers(address).items():
            if took_s and (not directions or direction in directions):
                self._note(f"gb_per_s.{direction}", num_bytes / took_s / 1e9)

    def _note(self, key: str, value: float) -> None:
        self.figures[key] = value
        print(f"  {key}: {value:g}", file=sys.stderr, flush=True)


def transfers(address: Address) -> Mapping[str, tuple[float, float]]:
    """Return the bytes and seconds of all copies so far, by direction. Raises ProbeFailed."""
    _, body = ask(address, "/metrics")
    found: dict[str, dict[str, float]] = {}
    for kind, direction, value in _TRANSFER.findall(body.decode()):
        found.setdefault(direction, {})[kind] = float(value)
    return {direction: (each.get("bytes", 0.0), each.get("time", 0.0)) for direction, each in found.items()}


def wait_for_copies(address: Address) -> None:
    """Wait until no tier has copied data for a moment. Raises ProbeFailed."""
    last = transfers(address)
    while True:
        time.sleep(SETTLED_S)
        now = transfers(address)
        if now == last:
            return
        last = now


def drop_from_page_cache(folder: Path) -> None:
    """Write the files in `folder` to disk and drop them from the page cache, so that later reads come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def main(args: argparse.Namespace) -> int:
    """Run the measurement. Return 0 if every answer was complete and its prefix came from the expected tier, 2 if nothing could
    begin."""
    try:
        check_size(args.vocab_size)
        if min(args.rounds, args.conversations, args.turns, args.words, args.output_tokens) < 1:
            raise ValueError("--rounds, --conversations, --turns, --words and --output-tokens must be at least 1")
        if args.prompt_tokens < 1 or args.pool_tokens < args.prompt_tokens + ROOM_TOKENS:
            raise ValueError(f"--pool-tokens {args.pool_tokens} must be at least --prompt-tokens + {ROOM_TOKENS}")
        if not (args.model_shape / "config.json").is_file():
            raise ValueError(f"--model-shape {args.model_shape}: it has no config.json")
    except ValueError as error:
        print(f"loadtests tiers: {error}", file=sys.stderr)
        return 2
    failure = None
    with processes.stop_signals_as_interrupt(), tempfile.TemporaryDirectory(prefix="oneloop-tiers-") as folder:
        session = Session(args, Path(folder))
        try:
            session.run()
        except (ServerFailed, ProbeFailed, CannotStart, OSError, ValueError) as error:
            failure = str(error)
            print(f"loadtests tiers: {failure}", file=sys.stderr)
    name = args.model_shape.resolve().name
    result = new_record("tiers", name, machine(), session.figures)
    result |= {"runs": session.runs, "problems": session.problems, "failure": failure}
    if session.runs:
        print("\n".join([serve_table(session.runs), *serve_remarks(session.runs), ""]))
    print(figures_table(name, result["figures"]))
    for problem in session.problems:
        print(f"loadtests tiers: {problem}", file=sys.stderr)
    if args.output_json is not None:
        add_to_file(args.output_json, result)
    print("\n" + json.dumps(result), flush=True)
    return 1 if failure or session.problems else 0
