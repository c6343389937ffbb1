"""Joins the metrics of several replicas in Prometheus' text format. Each sample is labelled with its replica.

The lines of a metric family must be contiguous, after a single HELP and TYPE."""

from __future__ import annotations

from collections.abc import Mapping


def joined(pages: Mapping[str, bytes]) -> bytes:
    """Return one metrics page for several replicas. `pages`: metrics page by name of the replica. Lines without a TYPE of their
    own stay below the preceding family."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # by name: what describes it, and its samples
    for replica, page in pages.items():
        name = ""
        for line in page.decode().splitlines():
            if line.startswith("# EOF") or not line.strip():
                continue
            if line.startswith("# "):
                words = line.split(" ", 3)
                name = words[2]
                described, _ = families.setdefault(name, ([], []))
                if line not in described:
                    described.append(line)
            else:
                families.setdefault(name, ([], []))[1].append(_labelled(line, replica))
    lines = [line for described, samples in families.values() for line in (*described, *samples)]
    return ("\n".join(lines) + "\n").encode()


def _labelled(sample: str, replica: str) -> str:
    label = f'replica="{replica}"'
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}" if not rest.startswith("}") else f"{name}{{{label}{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
