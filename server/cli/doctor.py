"""Command `oneloop doctor`: prints hardware, kernels, and missing dependencies with the commands that install them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from server.process.terminal import size_of

Found = Mapping[str, Any]


def show(argv: Sequence[str], usage: str, find: Callable[[], Found], text: Callable[[Found], str]) -> tuple[int, Found]:
    """Print the findings. Return the exit code and the findings: 2 and {} for unknown options. `find`, `text`: collect and
    format them."""
    if set(argv) & {"-h", "--help"}:
        print(usage, end="")
        return 0, {}
    if set(argv) - {"--json"}:
        print(usage, end="", file=sys.stderr)
        return 2, {}
    found = find()
    try:
        print(json.dumps(found) if "--json" in argv else text(found), flush=True)
    except BrokenPipeError:  # `| head` is no error, nor is it one to the interpreter, which flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0, found


USAGE = (
    "usage: oneloop doctor [--json] [--verbose]\n\nCheck hardware and dependencies.\n\n"
    "  --json     print the findings as JSON\n  --verbose  also list the kernel of each operation, and why no faster one\n"
)
MARKS = {"good": "ok  ", "note": "note", "missing": "MISS"}


def main(argv: Sequence[str], findings: Callable[[], Found]) -> int:
    """Print the findings. Return the exit code: 0, 1 if a useful dependency is missing, 2 for unknown options."""
    rest = [word for word in argv if word != "--verbose"]
    code, found = show(rest, USAGE, findings, partial(report, is_verbose=len(rest) < len(argv)))
    return code or int(any(finding["state"] == "missing" for finding in found.get("findings", ())))


def report(found: Found, *, is_verbose: bool) -> str:
    lines = []
    for finding in found["findings"]:
        lines.append(f"{MARKS[finding['state']]}  {finding['topic']:<12} {finding['text']}")
        if finding["mend"]:
            lines.append(f"{'':<19}try: {finding['mend']}")
    lines.append("")
    best = max((fit for fit in found["fits"] if fit["fits"] and fit["tokens_per_s"]), key=_weight, default=None)
    if best is not None:
        lines.append(
            f"The largest model of `oneloop models` that fits: {best['model']} in {best['format']} "
            f"({size_of(best['weights_bytes'])}), at most {best['tokens_per_s']:,.1f} tokens/s for one stream."
        )
    lines.append("oneloop models --fit lists all that fit.")
    if is_verbose:
        lines += ["", "The kernel of each operation:", "", *(f"      {line}" for line in found["kernels"])]
    else:
        lines.append("oneloop doctor --verbose also lists the kernel of each operation.")
    return "\n".join(lines)


def _weight(fit: Found) -> int:
    return int(fit["weights_bytes"])
