"""Command `oneloop models`: prints the models that can be served by name, or those that fit this machine (`--fit`)."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

from server.cli.doctor import Found, show
from server.process.terminal import size_of

USAGE = (
    "usage: oneloop models [--fit] [--json] [--verbose]\n\nList the models that have a short name, for run, serve and pull.\n\n"
    "  --fit      which of them fit this machine, and the maximum speed of one stream\n"
    "  --json     print the findings as JSON\n"
    "  --verbose  also list the architectures that can be served\n"
)
BY = {"native": "computed by oneloop's own kernels", "transformers": "through the transformers package, slower"}
TASKS = {
    "generate": "Chat", "embed": "Embeddings", "rerank": "Reranking", "transcribe": "Transcription",
}  # fmt: skip


def main(argv: Sequence[str], models: Callable[[], Found], fits: Callable[[], Found]) -> int:
    """Print the models. Return the exit code: 0, or 2 for unknown options. `fits`: measures this machine (1 to 2 s)."""
    rest = [word for word in argv if word not in ("--fit", "--verbose")]
    if "--fit" in argv:
        return show(rest, USAGE, fits, fit_report)[0]
    width = shutil.get_terminal_size().columns
    return show(rest, USAGE, models, partial(report, width=width, is_verbose="--verbose" in argv))[0]


def report(found: Found, *, width: int, is_verbose: bool) -> str:
    lines: list[str] = []
    for task, models in groupby(sorted(found["catalogue"], key=lambda model: [*TASKS].index(model["task"])), _task_of):
        lines += [f"{TASKS[task]}:", *map(_line, models), ""]
    if is_verbose:
        lines += [*_architectures(found, width), ""]
    lines.append("oneloop run NAME starts a chat, oneloop serve NAME a server. NAME:FORMAT chooses another format.")
    lines.append("oneloop models --fit lists what fits this machine, oneloop list what is on this disk.")
    return "\n".join(lines)


def _task_of(model: Found) -> str:
    return str(model["task"])


def _line(model: Found) -> str:
    formats, here = ", ".join(model["formats"]), "here" if model["here"] else ""
    return f"  {model['name']:<26}{size_of(model['bytes']):>11}  {model['license']:<12}{formats:<32}{here}".rstrip()


def _architectures(found: Found, width: int) -> Iterator[str]:
    for computed_by, words in BY.items():
        names = [name for name, by in found["architectures"].items() if by == computed_by]
        if names:
            yield f"{len(names)} architectures, as config.json names them, {words}:"
            yield _columns(names, width)
    if "transformers" in found["architectures"].values():
        yield "Other architectures of transformers are tried when a model needs them."
    else:
        yield "More are served through the transformers package, which is not installed here: pip install transformers."


def fit_report(found: Found) -> str:
    rate = found["memory_bytes_per_s"] / 1e9
    lines = [
        f"Free memory {size_of(found['memory_bytes'])}, read at {rate:.0f} GB/s (measured). Speed is the maximum of one stream.",
        "",
        f"  {'model':<26}{'weights':>18}{'KV cache, tokens':>20}{'tokens/s, at most':>20}",
    ]
    for fit in sorted(found["fits"], key=lambda fit: not fit["fits"]):
        weights = f"{fit['format']} {size_of(fit['weights_bytes'])}"
        cells = f"{'does not fit':>20}"
        if fit["fits"]:
            cells = f"{fit['kv_tokens']:>20,}" if fit["kv_tokens"] else f"{'':>20}"
            cells += "" if fit["tokens_per_s"] is None else f"{fit['tokens_per_s']:>20,.1f}"
        lines.append(f"  {fit['model']:<26}{weights:>18}{cells}".rstrip())
    return "\n".join(lines)


def _columns(names: Sequence[str], width: int) -> str:
    text = " ".join(sorted(names, key=str.lower))
    return textwrap.fill(text, max(40, width), initial_indent="  ", subsequent_indent="  ", break_long_words=False)
