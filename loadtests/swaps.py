"""Command `oneloop bench swaps`: cost of several models on one device that are loaded one at a time.

It measures a running server with several `--model`. Each model gets two requests: the first waits for the model to be loaded,
the second does not. The difference is the pause. All answers of a model must be equal. Then streams run on one model while
another model is requested: no stream may end early. A model that cannot be loaded is reported and must not affect the others.
The memory of the device (nvidia-smi) and of the server (--pid) is also reported."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from loadtests import processes
from loadtests.address import Address, AddressRefused
from loadtests.probe import ProbeFailed, ask

SUMMARY = "several models loaded one at a time: duration and memory of swaps; streams must not be cut off"
PROMPT = "Once upon a time there was"
LIMIT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", "--url", type=Address.parse, required=True, metavar="URL")
    add("--models", nargs="+", metavar="NAME", help="two or more models (default: all that generate)")
    add(
        "--rounds", type=int, default=3, metavar="N", help="number of times that each model is loaded again (default 3)"
    )
    add("--max-tokens", type=int, default=16, metavar="N", help="output tokens of an answer (default 16)")
    add("--streams", type=int, default=8, metavar="N", help="concurrent streams during a swap (default 8)")
    add("--stream-tokens", type=int, default=256, metavar="N", help="output tokens of each stream (default 256)")
    add("--pid", type=int, help="process id of the server, to report its memory")


@dataclass(slots=True)
class Answer:
    """Answer of a model. `failure`: the server's message if the request failed."""

    text: str
    num_tokens: int
    taken_s: float
    failure: str | None = None


@dataclass(slots=True)
class Turns:
    """Observations of one model. `first_s`: time of its first answer, including loading. `waited_s`: times of later answers that
    waited for the model to be loaded. `alone_s`: times of answers that did not wait."""

    first_s: float = 0.0
    texts: set[str] = field(default_factory=set)
    waited_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    device_mib: list[int] = field(default_factory=list)
    failure: str | None = None

    def figures(self) -> dict[str, Any]:
        if self.failure is not None:
            return {"failure": self.failure}
        alone_s = statistics.median(self.alone_s)
        pauses_s = [max(0.0, each - alone_s) for each in self.waited_s]
        return {
            "first_s": round(self.first_s, 3),
            "pause_s": round(statistics.median(pauses_s), 3),
            "longest_pause_s": round(max(pauses_s), 3),
            "alone_s": round(alone_s, 3),
            "same_answers": len(self.texts) == 1,
            "device_mib": self.device_mib,
        }


def complete(address: Address, model: str, max_tokens: int, *, stream: bool = False) -> Answer:
    """Request a completion from `model` and return the answer. Raises ProbeFailed if the server does not respond."""
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }  # fmt: skip
    began_s = time.perf_counter()
    status, content = ask(address, "/v1/completions", body, LIMIT_S)
    taken_s = time.perf_counter() - began_s
    try:
        if status != 200:
            return Answer("", 0, taken_s, str(json.loads(content)["error"]["message"]))
        return Answer(*(_streamed(content) if stream else _whole(content)), taken_s)
    except (ValueError, LookupError, TypeError):
        return Answer("", 0, taken_s, f"HTTP {status}: {content[-200:].decode(errors='replace')}")


def _whole(content: bytes) -> tuple[str, int]:
    parsed = json.loads(content)
    return parsed["choices"][0]["text"], parsed["usage"]["completion_tokens"]


def _streamed(content: bytes) -> tuple[str, int]:
    """Return text and number of tokens of a streamed answer. Raises ValueError if the stream was cut off."""
    events = [line.removeprefix(b"data: ") for line in content.splitlines() if line.startswith(b"data: ")]
    if not events or events.pop() != b"[DONE]":
        raise ValueError("no end")
    parsed = [json.loads(each) for each in events]
    text = "".join(choice["text"] for each in parsed for choice in each["choices"])
    return text, parsed[-1]["usage"]["completion_tokens"]


def device_mib() -> int | None:
    """Return the memory of the first GPU that all processes use, in MiB; None without a GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        return int(done.stdout.split()[0]) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, LookupError, ValueError):
        return None


def generating_models(address: Address) -> list[str]:
    """Return the ids of the server's models that generate text. Raises ProbeFailed."""
    status, content = ask(address, "/v1/models")
    try:
        cards = json.loads(content)["data"]
        return [card["id"] for card in cards if "generate" in (card.get("tasks") or ["generate"])]
    except (ValueError, LookupError, TypeError):
        raise ProbeFailed(f"{address.url}/v1/models: HTTP {status} lists no models") from None


def take_turns(address: Address, models: list[str], rounds: int, max_tokens: int) -> dict[str, Turns]:
    """Send requests to each model alternately, for `rounds` rounds. Raises ProbeFailed."""
    found = {model: Turns() for model in models}
    for number in range(rounds + 1):
        for model in [each for each in models if found[each].failure is None]:
            turns = found[model]
            first = complete(address, model, max_tokens)
            again = complete(address, model, max_tokens) if first.failure is None else first
            turns.failure = again.failure
            if turns.failure is not None:
                print(f"  {model}: {turns.failure}", file=sys.stderr, flush=True)
                continue
            turns.texts |= {first.text, again.text}
            turns.alone_s.append(again.taken_s)
            if number:
                turns.waited_s.append(first.taken_s)
            else:
                turns.first_s = first.taken_s
            if (taken := device_mib()) is not None:
                turns.device_mib.append(taken)
            print(f"  {model}: {first.taken_s:.2f} s, then {again.taken_s:.2f} s", file=sys.stderr, flush=True)
    return found


def beside_streams(address: Address, model: str, other: str, num: int, num_tokens: int) -> dict[str, Any]:
    """Run `num` streams of `model`, and one request to `other` at the same time. Return the observations. Raises ProbeFailed."""
    answers: list[Answer] = []
    failures: list[ProbeFailed] = []
    alone = complete(address, model, num_tokens)  # what they are to say; the model is loaded then

    def stream() -> None:
        try:
            answers.append(complete(address, model, num_tokens, stream=True))
        except ProbeFailed as error:
            failures.append(error)

    threads = [threading.Thread(target=stream) for _ in range(num)]
    for each in threads:
        each.start()
    while len(answers) + len(failures) < num and _running(address) < num:
        time.sleep(0.001)
    num_done = len(answers)
    swapped = complete(address, other, 1)
    num_whole_before = len(answers)
    for each in threads:
        each.join()
    return {
        "streams": num,
        "done_before_the_other_was_asked": num_done,
        "done_when_it_answered": num_whole_before,
        "whole": sum(each.num_tokens == num_tokens for each in answers),
        "same_text": sum(each.text == alone.text for each in answers),
        "other_s": round(swapped.taken_s, 3),
        "failures": [*map(str, failures), *(each.failure for each in (*answers, swapped) if each.failure is not None)],
    }


def _running(address: Address) -> int:
    _, content = ask(address, "/health")
    return int(json.loads(content).get("running") or 0)


def main(args: argparse.Namespace) -> int:
    """Run the measurement. Return 0 if each loadable model gave equal answers and no stream was cut off, 2 if nothing could
    begin."""
    address = args.base_url
    try:
        models = args.models or generating_models(address)
        if len(models) < 2 or min(args.rounds, args.max_tokens, args.streams, args.stream_tokens) < 1:
            raise ValueError("at least two models are needed; rounds, tokens and streams must be at least 1")
        found = take_turns(address, models, args.rounds, args.max_tokens)
        able = [model for model in models if found[model].failure is None]
        streams = None
        if len(able) > 1:
            streams = beside_streams(address, able[0], able[1], args.streams, args.stream_tokens)
    except (AddressRefused, ProbeFailed, ValueError) as error:
        print(f"bench swaps: {error}", file=sys.stderr)
        return 2
    figures = {model: turns.figures() for model, turns in found.items()}
    print(f"{'model':32} {'first':>9} {'pause':>9} {'longest':>9} {'alone':>9}  same  device MiB")
    for model, each in figures.items():
        if "failure" in each:
            print(f"{model:32} {each['failure']}")
            continue
        seconds = " ".join(f"{each[name]:7.2f} s" for name in ("first_s", "pause_s", "longest_pause_s", "alone_s"))
        print(
            f"{model:32} {seconds}  {'yes' if each['same_answers'] else 'NO':4}  {' '.join(map(str, each['device_mib']))}"
        )
    result: dict[str, Any] = {"models": figures, "streams": streams}
    if args.pid is not None:
        result["rss_mib"] = round(processes.resident_mib(args.pid), 1)
    print(json.dumps({"command": "swaps", "base_url": address.url, **result}), flush=True)
    cut = streams is not None and (streams["whole"] != streams["streams"] or bool(streams["failures"]))
    return 1 if cut or len(able) < 2 or not all(figures[model]["same_answers"] for model in able) else 0
