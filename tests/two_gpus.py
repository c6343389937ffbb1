"""All that is to be shown on two GPUs of one host, by one call: `python -m tests.two_gpus --out FOLDER`, ten minutes.

Steps one behind another, the least known first; what each prints is kept in FOLDER, its last lines are shown. A step that hangs
ends at its limit, and one for which no time is left is said. `--rehearse` does the same on a CPU, with models of some layers."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SHAPES = Path(__file__).parents[1] / "loadtests/shapes"
# Records for programs, and what Python's end leaves.
_SILENT = re.compile(r"\{| - |nanobind: |See https://nanobind|.*WARN")
LEAST_S = 10.0  # for which no step is worth its begin
SHOWN_LINES, SHOWN_CHARS = 8, 200
_TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
_REHEARSED = {
    "llama-3.1-8b": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_TINY},
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, **_TINY,
    },
}  # fmt: skip
_REHEARSED["llama-3.1-70b"] = _REHEARSED["qwen3-0.6b"] = _REHEARSED["llama-3.1-8b"]


class Step(NamedTuple):
    name: str
    limit_s: float
    arguments: tuple[str, ...]  # behind `python -m`


class Ended(NamedTuple):
    code: int | None  # None: at its limit
    took_s: float


def steps(shapes: Path, *, on_gpus: bool) -> list[Step]:
    """What is unknown comes first, then what has been measured before and is to be compared."""
    batches, prefill = (("1", "32", "256"), "8x8192") if on_gpus else (("1", "4"), "2x64")
    device = (
        ()
        if on_gpus
        else ("--device", "cpu", "--dtype", "float32", "--max-model-len", "1024", "--num-kv-blocks", "1024")
    )
    tests = (
        "tests/ops/test_peer_memory.py", "tests/equality/test_tensor_parallel.py", "tests/equality/test_pipeline_parallel.py",
        "tests/equality/test_lora_parallel.py",
    )  # fmt: skip

    def measured(name: str, limit_s: float, shape: str, *options: str, start_alone: bool = False) -> Step:
        figures = ("--batch", "1") if start_alone else ("--batch", *batches, "--prefill", prefill)
        return Step(
            name, limit_s,
            ("loadtests", "steps", "--model", str(shapes / shape), *figures, "--", *device, *options),
        )  # fmt: skip

    def served(name: str, *options: str) -> Step:
        workload = "c512_128_128" if on_gpus else "c4_16_8"
        return Step(
            name, 75,
            (
                "loadtests", "gpu", "--model-shape", str(shapes / "qwen3-0.6b"), "--no-cold", "--idle-seconds", "0",
                "--workload", workload, "--", *device, *options,
            ),
        )  # fmt: skip

    tp, ep, pp = ("--tensor-parallel-size", "2"), "--enable-expert-parallel", ("--pipeline-parallel-size", "2")
    found = [
        Step("topology", 20, ("server", "doctor")),
        Step(
            "tests", 150,
            ("pytest", "-q", "-m", "gpu", "-p", "no:benchmark", "-p", "no:cacheprovider", "-n", "3", "--tb", "short", *tests),
        ),
        Step(
            "stages in two processes, by NCCL", 60,
            ("tests.benches.stages", "--device", "cuda" if on_gpus else "cpu"),
        ),
        measured("8b, one", 45, "llama-3.1-8b"),
        measured("8b, -tp 2", 45, "llama-3.1-8b", *tp),
        measured("8b, -pp 2", 45, "llama-3.1-8b", *pp),
        measured("30b-a3b, -tp 2 with whole experts", 60, "qwen3-30b-a3b", *tp, ep),
        measured("30b-a3b, -tp 2", 60, "qwen3-30b-a3b", *tp),
        measured("8b, one: start with all compiled", 25, "llama-3.1-8b", start_alone=True),
        measured("8b, -tp 2: start with all compiled", 25, "llama-3.1-8b", *tp, start_alone=True),
        measured("30b-a3b, one", 60, "qwen3-30b-a3b"),
        served("0.6b, one"),
        served("0.6b, -dp 2", "--data-parallel-size", "2"),
        measured("70b, -tp 2", 90, "llama-3.1-70b", *tp),
        measured("70b, -pp 2", 90, "llama-3.1-70b", *pp),
        Step("CPU of the loop by devices", 60, ("tests.benches.devices",)),
    ]  # fmt: skip
    if on_gpus:
        found.insert(3, Step("sums beside NCCL", 45, ("tests.benches.ops.peers",)))
    return found


def run_step(step: Step, limit_s: float, into: Path) -> Ended:
    """Its processes end with it. A step at its limit is asked first to end what it has begun."""
    began_s = time.monotonic()
    with into.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *step.arguments], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(code, time.monotonic() - began_s)


def run_all(
    planned: Sequence[Step], seconds: float, folder: Path, *, clock: Callable[[], float] = time.monotonic,
    run: Callable[[Step, float, Path], Ended] = run_step, tell: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """The number of steps that did not end well, or at all."""
    ends_s, num_lost = clock() + seconds, 0
    for number, step in enumerate(planned):
        left_s = ends_s - clock()
        if left_s < LEAST_S:
            tell(f"## {step.name}: no time was left")
            num_lost += 1
            continue
        into = folder / f"{number:02}.txt"
        ended = run(step, min(step.limit_s, left_s), into)
        num_lost += ended.code != 0
        tell(
            f"## {step.name}: {'at its limit' if ended.code is None else f'exit {ended.code}'}, {ended.took_s:.0f} s, {into.name}"
        )
        lines = [
            line for line in into.read_text(errors="replace").splitlines() if line.strip() and not _SILENT.match(line)
        ]
        for line in lines[-SHOWN_LINES:]:
            tell(line[:SHOWN_CHARS])
    return num_lost


def rehearsed_shapes(folder: Path) -> Path:
    for name, config in _REHEARSED.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for what each step prints")
    parser.add_argument("--shapes", type=Path, default=SHAPES, metavar="FOLDER", help="of models' config.json")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all together (default 570)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="steps whose name has one of these in it")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        shapes = rehearsed_shapes(Path(made)) if given.rehearse else given.shapes
        planned = steps(shapes, on_gpus=not given.rehearse)
        if given.only:
            planned = [step for step in planned if any(word in step.name for word in given.only)]
        sys.exit(min(run_all(planned, given.seconds, given.out, tell=lambda line: print(line, flush=True)), 1))


if __name__ == "__main__":
    main()
