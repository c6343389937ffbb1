"""Rules of transcripts: what is drawn is what transformers' logits processors of Whisper let through, whatever was drawn before."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from runtime.api import SamplingParams, TranscriptRules
from runtime.batch import RowBinding
from runtime.sample.sampler import Sampler

VOCAB, END, NO_TIMESTAMPS, BEGIN = 120, 90, 99, 100
PROMPT = (95, 96)
RULES = TranscriptRules(frozenset({3, 95, 96, 97, NO_TIMESTAMPS}), frozenset({7, END}), BEGIN, END, 10)
CPU = torch.device("cpu")


def expected_rules(initial: int | None) -> LogitsProcessorList:
    config = GenerationConfig(eos_token_id=END, no_timestamps_token_id=NO_TIMESTAMPS)
    config.max_initial_timestamp_index = initial
    return LogitsProcessorList([
        SuppressTokensAtBeginLogitsProcessor([7, END], len(PROMPT)),
        SuppressTokensLogitsProcessor([3, 95, 96, 97, NO_TIMESTAMPS]),
        WhisperTimeStampLogitsProcessor(config, len(PROMPT)),
    ])  # fmt: skip


class Drawing:
    """A sampler and its rows: `rules` of each, with what each has drawn."""

    def __init__(self, *rules: TranscriptRules | None) -> None:
        self.sampler = Sampler(VOCAB, frozenset({END}), len(rules), CPU, transcribes=True)
        self.params = [SamplingParams(50, temperature=0.0, transcript=each) for each in rules]
        self.ids: list[list[int]] = [[] for _ in rules]
        for row in range(len(rules)):
            self.bind(row)

    def bind(self, row: int) -> None:
        self.sampler.bind(row, RowBinding(self.params[row], 0, PROMPT, tuple(self.ids[row])))

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw the next token of each row; return the logits that it was drawn from."""
        changed, rows = logits.clone(), torch.arange(len(logits), dtype=torch.int32)
        positions = torch.tensor([len(PROMPT) + len(ids) for ids in self.ids])
        drawn = self.sampler.sample(changed, rows, positions, torch.zeros(len(logits), dtype=torch.int64))
        for ids, id in zip(self.ids, drawn.tolist(), strict=True):
            ids.append(id)
        return changed


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("initial", [10, None])
def test_logits_are_those_of_the_reference_at_every_step(seed, initial):
    rules = TranscriptRules(RULES.suppressed_ids, RULES.first_suppressed_ids, BEGIN, END, initial)
    random, drawing, reference = torch.Generator().manual_seed(seed), Drawing(rules), expected_rules(initial)
    for step in range(24):
        logits = torch.randn(1, VOCAB, generator=random) * 2
        logits[:, BEGIN:] += 2.5 * (step % 4 == 3)  # so that segments end
        before = torch.tensor([[*PROMPT, *drawing.ids[0]]])
        wanted = reference(before, logits.clone())
        assert torch.equal(drawing.draw(logits), wanted)
        assert drawing.ids[0][-1] == int(wanted.argmax())
        if step % 5 == 4:
            drawing.bind(0)  # as after a preemption


def test_segments_end_in_the_random_walk():
    random, drawing = torch.Generator().manual_seed(1), Drawing(RULES)
    for step in range(24):
        logits = torch.randn(1, VOCAB, generator=random) * 2
        logits[:, BEGIN:] += 2.5 * (step % 4 == 3)
        drawing.draw(logits)
    assert sum(id >= BEGIN for id in drawing.ids[0]) > 2
    assert any(id < END for id in drawing.ids[0])


def test_each_row_follows_its_own_rules():
    words = TranscriptRules(RULES.suppressed_ids, RULES.first_suppressed_ids, None, END)
    drawing, logits = Drawing(RULES, None, words), torch.zeros(3, VOCAB)
    logits[:, 3], logits[:, 7], logits[:, BEGIN + 30 - 20] = 9.0, 8.0, 5.0
    changed = drawing.draw(logits)
    assert torch.equal(changed[1], logits[1])
    assert [ids[0] for ids in drawing.ids] == [BEGIN + 10, 3, BEGIN + 10]
    drawing.draw(logits)
    assert drawing.ids[2][1] == 7, "only the first token may not be that"


def test_rows_that_are_not_sampled_keep_their_place():
    drawing = Drawing(RULES, RULES)
    logits = torch.zeros(2, VOCAB)
    logits[:, BEGIN + 4] = 5.0
    for _ in range(2):
        last = torch.zeros(2, dtype=torch.int64)
        rows = torch.tensor([0, -1], dtype=torch.int32)
        drawing.sampler.sample(logits.clone(), rows, torch.tensor([len(PROMPT), 0]), last)
        drawing.bind(0)
    drawing.draw(logits)
    assert drawing.ids == [[BEGIN + 4], [BEGIN + 4]]


def test_too_many_suppressed_tokens_are_refused():
    with pytest.raises(ValueError, match="the maximum is 256"):
        Drawing(TranscriptRules(suppressed_ids=frozenset(range(257))))
