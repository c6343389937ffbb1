"""A model whose stages are Ray actors, as a user has it: the answers of one process, and its end when an actor is gone."""

from __future__ import annotations

import os
import re
import signal

import psutil

ASKED = {
    "model": "smollm2-135m-instruct", "prompt": "The harbour master keeps a log of", "max_tokens": 24, "temperature": 0,
    "logprobs": 2,
}  # fmt: skip


def test_stages_as_ray_actors_answer_as_one_process_does_and_end_with_one_of_them(start):
    on_ray = start(
        "--pipeline-parallel-size", "2", "--distributed-executor-backend", "ray", "--max-num-seqs", "8",
        "--threads", "1", "--log-level", "info", "--device", "cpu",
    )  # fmt: skip
    alone = start("--threads", "1", "--device", "cpu")
    placed = re.search(r"stage 1 of 2 is computed by process (\d+) on ", on_ray.wait_until_said("is computed by"))
    assert placed is not None
    for each in (alone, on_ray):
        each.wait_until_healthy()
    answers = [
        each.client().completions.create(**ASKED, extra_body={"ignore_eos": True}).choices[0]
        for each in (alone, on_ray, on_ray)  # the last one finds the prompt cached
    ]
    assert answers[0].text == answers[1].text == answers[2].text
    assert answers[0].logprobs.tokens == answers[1].logprobs.tokens
    processes = psutil.Process(on_ray.process.pid).children(recursive=True)
    os.kill(int(placed[1]), signal.SIGKILL)
    assert on_ray.process.wait() == 70
    last = [line for line in on_ray.log if line.startswith("oneloop: the device")]
    assert len(last) == 1
    assert f"process {placed[1]} on " in last[0]
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
