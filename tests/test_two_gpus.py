"""The call that shows all there is to be shown on two GPUs: its steps exist, and no step takes the others' time."""

from __future__ import annotations

import argparse
import importlib.util

import pytest

from loadtests.engine.arguments import parser
from tests.two_gpus import SHAPES, Ended, Step, rehearsed_shapes, run_all, run_step, steps


@pytest.mark.parametrize("on_gpus", [True, False])
def test_every_step_is_there_to_be_begun(on_gpus, tmp_path):
    for step in steps(SHAPES if on_gpus else rehearsed_shapes(tmp_path), on_gpus=on_gpus):
        module, *arguments = step.arguments
        assert importlib.util.find_spec(module) is not None
        for path in (each for each in arguments if each.startswith("tests/")):
            assert (SHAPES.parents[1] / path).is_file()
        if module == "loadtests":
            name, *own = arguments
            command = importlib.import_module(f"loadtests.{name}")
            command.add_arguments(known := argparse.ArgumentParser())
            given = known.parse_args(own)
            if name == "steps":
                options = command.command_of(given)
                parser().parse_args(options[options.index("--model") :])


def test_a_step_gets_what_time_is_left_and_no_more_than_its_limit(tmp_path):
    now_s, told, given = 0.0, [], []

    def run(step, limit_s, into):
        nonlocal now_s
        given.append((step.name, limit_s))
        now_s += limit_s
        into.write_text(f"of {step.name}\n")
        return Ended(None if step.name == "b" else 0, limit_s)

    planned = [Step("a", 40, ()), Step("b", 90, ()), Step("c", 10, ())]
    assert run_all(planned, 100, tmp_path, clock=lambda: now_s, run=run, tell=told.append) == 2
    assert given == [("a", 40), ("b", 60)]
    assert told == [
        "## a: exit 0, 40 s, 00.txt", "of a", "## b: at its limit, 60 s, 01.txt", "of b", "## c: no time was left",
    ]  # fmt: skip


def test_what_a_step_prints_is_kept_and_so_is_how_it_ended(tmp_path):
    ended = run_step(Step("none", 60, ("no_such_module",)), 60, tmp_path / "out")
    assert ended.code == 1
    assert "No module named no_such_module" in (tmp_path / "out").read_text()
