"""Speech benchmark: prints one JSON line for the start, one for the minimum work, and one for each system and number of files."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from loadtests.engine.figures import emit
from loadtests.engine.machine import device_facts
from loadtests.engine.speech import shape, sounds
from loadtests.engine.speech.systems import FasterWhisper, Oneloop, System, Transformers, WhisperCpp
from runtime.weights.fetch import ModelFiles, resolve

DEFAULTS: dict[str, dict[str, Any]] = {"cuda": {"dtype": "bfloat16", "gpu_memory_utilization": 0.5}, "cpu": {}}


def engine_options(words: Sequence[str]) -> dict[str, Any]:
    """Return command-line words such as `--quantization int8` as options of an LLM. A flag without value is true."""
    options: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].replace("-", "_").partition("=")
            options[name] = _read(value) if value else True
        else:
            options[name] = _read(word)
    return options


def _read(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def systems(wanted: dict[str, Any], model: str, files: ModelFiles) -> Iterator[System]:
    """Yield the systems of --beside, then oneloop: torch cannot draw random weights while oneloop captures CUDA graphs."""
    tokens, device, threads = wanted["tokens"], wanted["device"], wanted["threads"]
    for name in wanted["beside"]:
        if name == "transformers":
            yield Transformers(files, tokens, device)
        elif name == "faster-whisper":
            yield FasterWhisper(files.path, threads, wanted["compute_type"])
        else:
            yield WhisperCpp(Path(wanted["ggml"]), threads)
    options = {"device": device, **({} if device == "cuda" else {"threads": threads})}
    options |= DEFAULTS[device] | engine_options(wanted["engine_options"])
    yield Oneloop(model, tokens, options)


def emit_floor(config: dict[str, Any], device: str) -> None:
    """Print the minimum work of a window and of a step, in operations and bytes."""
    size = 2 if device == "cuda" else 4
    emit(
        "floor", encoder_tflop_per_window=shape.encoder_flops(config) / 1e12, element_bytes=size,
        step_mib=shape.step_bytes(config, size) / 2**20, row_mib=shape.row_bytes(config, size) / 2**20,
    )  # fmt: skip


def measure(found: Sequence[System], whole: Sequence[sounds.Samples], num_files: int, rounds: int) -> None:
    """Print the best rate of each system, and its lowest CPU time in seconds. An additional first round is not counted."""
    seconds: dict[str, list[float]] = {system.name: [] for system in found}
    cpu: dict[str, list[float]] = {system.name: [] for system in found}
    texts: dict[str, list[str]] = {}
    for number in range(rounds + 1):
        given = sounds.of_round(whole, num_files, number)
        for system in found:
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            texts[system.name] = system.transcribe(given)
            seconds[system.name].append(time.perf_counter() - begun_s)
            cpu[system.name].append(time.process_time() - begun_cpu_s)
    audio_s = sum(map(len, given)) / sounds.RATE
    for system in found:
        taken_s = seconds[system.name][1:]
        emit(
            "speech", system=system.name, files=num_files, audio_s=audio_s, audio_s_per_s=audio_s / min(taken_s),
            words=sum(len(text.split()) for text in texts[system.name]), runs_s=[round(each, 4) for each in taken_s],
            first_s=round(seconds[system.name][0], 4), cpu_s=round(min(cpu[system.name][1:]), 4),
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    (given,) = sys.argv[1:] if argv is None else argv
    wanted = json.loads(given)
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        model = wanted["model"]
        if wanted["tokens"] is not None:
            shape.write(Path(model), Path(made))
            model = made
        files = resolve(model, None, lambda progress: None, **({"load_format": "dummy"} if model == made else {}))
        begun_s = time.perf_counter()
        found = [stack.enter_context(closing(system)) for system in systems(wanted, model, files)]
        emit("start", seconds=round(time.perf_counter() - begun_s, 2), **device_facts(wanted["device"]))
        emit_floor(files.config, wanted["device"])
        whole = [sounds.read(Path(path)) for path in wanted["audio"]]
        whole = whole or [sounds.generated(wanted["seconds"], seed) for seed in range(4)]
        for num_files in wanted["files"]:
            measure(found, whole, num_files, wanted["rounds"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
