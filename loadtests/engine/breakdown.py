"""Breakdown of a decode step's time by kernel, computed from a profile. Plain data, independent of the profiler."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.engine.workloads import MeasureError


@dataclass(frozen=True, slots=True)
class KernelRun:
    """Execution of a kernel or copy on the device."""

    name: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def whole_steps(kernels: Sequence[KernelRun], num_steps: int) -> tuple[list[KernelRun], float, float, int]:
    """Return the kernels of complete steps, start and end of their window, and the number of steps in the window.

    Steps are separated by a kernel that occurs once per step. The first two steps, during which the profiler started, are
    dropped. If there is no such kernel, all kernels are returned as `num_steps` steps."""
    counts = Counter(kernel.name for kernel in kernels)
    once = next((k.name for k in kernels if abs(counts[k.name] - num_steps) <= 3 and counts[k.name] > 1), None)
    if once is None:
        return list(kernels), kernels[0].start_us, max(kernel.end_us for kernel in kernels), max(1, num_steps)
    marks = [kernel.start_us for kernel in kernels if kernel.name == once]
    marks = marks[2:] if len(marks) > 4 else marks
    inside = [kernel for kernel in kernels if marks[0] <= kernel.start_us < marks[-1]]
    return inside, marks[0], marks[-1], len(marks) - 1


def breakdown(kernels: Sequence[KernelRun], num_steps: int) -> dict[str, Any]:
    """Return means over complete steps, in microseconds. `kernels`: time by kernel name, with the share of all kernels. `gaps`:
    idle time by the kernels before and after. `busy_us` (overlapping kernels count once) plus `idle_us` equals `step_us`."""
    if not kernels:
        raise MeasureError("the profiler recorded no kernels")
    ordered = sorted(kernels, key=lambda kernel: kernel.start_us)
    inside, begin_us, end_us, steps = whole_steps(ordered, num_steps)
    total_us, counts = defaultdict[str, float](float), Counter(kernel.name for kernel in inside)
    gap_us, gap_counts = defaultdict[tuple[str, str], float](float), Counter[tuple[str, str]]()
    idle_us, reached_us, last = 0.0, begin_us, inside[-1].name
    for kernel in inside:
        total_us[kernel.name] += kernel.duration_us
        if kernel.start_us > reached_us:
            between = (last, kernel.name)
            gap_us[between] += kernel.start_us - reached_us
            gap_counts[between] += 1
            idle_us += kernel.start_us - reached_us
        if kernel.end_us > reached_us:
            reached_us, last = kernel.end_us, kernel.name
    if end_us > reached_us:
        between = (last, inside[0].name)
        gap_us[between] += end_us - reached_us
        gap_counts[between] += 1
        idle_us += end_us - reached_us
    whole_us = sum(total_us.values()) or 1.0
    return {
        "steps": steps,
        "step_us": (end_us - begin_us) / steps,
        "busy_us": (end_us - begin_us - idle_us) / steps,
        "idle_us": idle_us / steps,
        "num_kernels": len(inside) / steps,
        "kernels": [
            {"name": name, "count": counts[name] / steps, "us": us / steps, "share": us / whole_us}
            for name, us in sorted(total_us.items(), key=lambda item: -item[1])
        ],
        "gaps": [
            {"after": pair[0], "before": pair[1], "count": gap_counts[pair] / steps, "us": us / steps}
            for pair, us in sorted(gap_us.items(), key=lambda item: -item[1])[:20]
        ],
    }


def profile_text(found: Mapping[str, Any]) -> str:
    lines = [
        f"decode at batch {found['batch']} on {found['device']}: means of {found['steps']} steps, profiler on",
        f"step {found['step_us']:.1f} us = busy {found['busy_us']:.1f} + idle {found['idle_us']:.1f}; "
        f"{found['num_kernels']:.1f} kernels",
        "",
        f"{'count':>8} {'us/step':>10} {'share':>7}  kernel",
    ]
    lines += [f"{k['count']:8.1f} {k['us']:10.2f} {k['share']:7.1%}  {k['name'][:140]}" for k in found["kernels"]]
    lines += ["", f"{'count':>8} {'us/step':>10}  idle after -> before"]
    lines += [f"{g['count']:8.1f} {g['us']:10.2f}  {g['after'][:60]} -> {g['before'][:60]}" for g in found["gaps"]]
    return "\n".join(lines) + "\n"
