"""`oneloop doctor`: this machine as a server of models sees it: what it has, which kernels compute, what would fit and how fast it
could be at most, and what is missing, with the command that mends it. Text from findings that others made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.offline.findings import Found, show
from server.process.terminal import size_of

USAGE = "usage: oneloop doctor [--json]\n\nLook at this machine: processor, GPUs, kernels, what would fit, what is missing.\n"
MARKS = {"good": "ok  ", "note": "note", "missing": "MISS"}


def main(argv: Sequence[str], findings: Callable[[], Found]) -> int:
    """The exit code: 0, 1 where something is missing that serving would be better with, 2 for options there are not."""
    code, found = show(argv, USAGE, findings, report)
    return code or int(any(finding["state"] == "missing" for finding in found.get("findings", ())))


def report(found: Found) -> str:
    lines = []
    for finding in found["findings"]:
        lines.append(f"{MARKS[finding['state']]}  {finding['topic']:<12} {finding['text']}")
        if finding["mend"]:
            lines.append(f"{'':<19}try: {finding['mend']}")
    rate = found["memory_bytes_per_s"] / 1e9
    lines += [
        "",
        f"What would fit into {size_of(found['memory_bytes'])} that are free, and how fast one stream could be at most, at the "
        f"{rate:.0f} GB/s that were just copied (a token reads every weight):",
        "",
        f"      {'model':<16}{'weights':>14}{'KV cache, tokens':>20}{'tokens a second':>18}",
    ]
    for fit in found["fits"]:
        weights = f"{fit['format']} {size_of(fit['weights_bytes'])}"
        cells = f"{fit['kv_tokens']:>20,}{fit['tokens_per_s']:>18,.1f}" if fit["fits"] else f"{'does not fit':>20}"
        lines.append(f"      {fit['model']:<16}{weights:>14}{cells}")
    lines += ["", "What computes each operation in the usual case:", ""]
    return "\n".join([*lines, *(f"      {line}" for line in found["kernels"])])
