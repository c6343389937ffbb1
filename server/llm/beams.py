"""Beam search in vLLM's words: `BeamSearchParams` in, `BeamSearchOutput` out, over what `generate` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.llm.outputs import Logprob, RequestOutput


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    @property
    def fields(self) -> dict[str, object]:
        """As `SamplingParams` has them; `logprobs` for the sum that ranks beams."""
        return {
            "use_beam_search": True,
            "n": self.beam_width,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": self.temperature,
            "length_penalty": self.length_penalty,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "logprobs": 0,
        }


@dataclass(slots=True)
class BeamSearchSequence:
    """`tokens` and `text`: of prompt and answer. `logprobs`: for each token of the answer; `cum_logprob`: their sum."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beams_of(answer: RequestOutput, decode: Callable[[Sequence[int]], str]) -> BeamSearchOutput:
    found = []
    for output in answer.outputs:
        tokens = [*answer.prompt_token_ids, *output.token_ids]
        found.append(
            BeamSearchSequence(
                tokens, output.logprobs or [], output.cumulative_logprob or 0.0, decode(tokens), output.finish_reason,
                output.stop_reason,
            )
        )  # fmt: skip
    return BeamSearchOutput(found)
