"""Sequences for proposers: a prompt, and an answer so far."""

from __future__ import annotations

from collections.abc import Sequence as Several

from runtime.api import Request, SamplingParams
from runtime.sequence import Sequence


def sequence(
    prompt: Several[int], output: Several[int] = (), *, number: int = 1, prediction: Several[int] = (), salt=None
) -> Sequence:
    request = Request(str(number), [*prompt], SamplingParams(1000), cache_salt=salt, prediction=tuple(prediction))
    made = Sequence(request, number=number, max_model_len=100_000, seed=0)
    add(made, *output)
    return made


def add(sequence: Sequence, *token_ids: int) -> Sequence:
    """As the scheduler does when a step settles."""
    sequence.output_ids += token_ids
    sequence.num_known_tokens += len(token_ids)
    return sequence
