"""Outputs of `LLM`, with vLLM's names. A RequestOutput contains CompletionOutputs, which are complete or increments; a
BeamSearchOutput contains beams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from runtime.api import Output, TokenLogprobs
from server.generate.generation import Generation, PromptChoice
from server.generate.transcript import Transcript, TranscriptCall
from server.models.tokenizer import Tokenizer
from server.text.events import Malformed, Reasoning, Text


class RequestOutputKind(Enum):
    """Kind of the outputs of an iteration: the whole answer so far (CUMULATIVE), the new part (DELTA), or only the complete
    answer (FINAL_ONLY)."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token. `rank`: 1 for the most likely token; None for tokens requested by id."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """Completion of a prompt; there are n of them for each prompt.

    `token_ids` includes the token that ended the completion, `text` does not. `finish_reason`: "stop", "length" or "tool_calls";
    None while the completion continues. `stop_reason`: the stop string or stop token id that ended it. `logprobs`, if requested:
    for each token, the log-probabilities of the token and its alternatives, by token id. `cumulative_logprob`: sum over the tokens
    of the completion.

    In a chat, `text` is the answer without `reasoning`. `tool_calls` contains all calls once the completion has ended."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[TranscriptCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None

    def add(self, more: CompletionOutput) -> None:
        if more.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *more.logprobs]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + (more.cumulative_logprob or 0.0)
        self.text += more.text
        self.reasoning += more.reasoning
        self.tool_calls += more.tool_calls
        self.token_ids += more.token_ids
        self.finish_reason, self.stop_reason = more.finish_reason, more.stop_reason

    def copy(self) -> CompletionOutput:
        """Return a copy that later `add` calls do not change."""
        return dataclasses.replace(self, tool_calls=[*self.tool_calls], token_ids=[*self.token_ids])


@dataclass(slots=True)
class RequestOutput:
    """Output of one prompt. `outputs`: its n completions, by index. `agenerate` and `achat` yield increments: only completions
    that changed, with new text and token ids. `prompt`: text of the prompt, for a conversation the rendered template; None for a
    prompt of token ids. `finished`: whether this is the last output. `num_cached_tokens`: prompt tokens from the prefix cache.
    `prompt_logprobs`, if requested: in the last output, for each token of the prompt; None for the first. With `best_of`,
    completions are returned only when all are complete."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def increment(generation: Generation, output: Output, transcript: Transcript) -> CompletionOutput:
    """Return the new part of a completion in `output`. `transcript`: the completion so far, which is extended."""
    choice = generation.choices[output.index]
    before = choice.num_tokens
    events = choice.events(output)
    transcript.add(events)
    # Ids behind a stop string came from the engine, and belong to nobody.
    ids = list(output.token_ids[: choice.num_tokens - before])
    more = CompletionOutput(
        output.index,
        "".join(event.text for event in events if isinstance(event, Text | Malformed)),
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        transcript.calls if choice.finish_reason is not None else [],
        ids,
        choice.finish_reason,
        choice.stop_reason,
    )
    if generation.options.logprobs is not None:
        found = list(zip(ids, output.logprobs or (), strict=False))
        by_id = bool(generation.requests[output.index].sampling.logprob_token_ids)
        more.logprobs = [_shown(generation.tokenizer, id, entry, ranked=not by_id) for id, entry in found]
        more.cumulative_logprob = sum(entry.logprob for _, entry in found)
    return more


def _shown(tokenizer: Tokenizer, id: int, found: TokenLogprobs, *, ranked: bool = True) -> dict[int, Logprob]:
    def text(id: int) -> str:
        return tokenizer.token_bytes(id).decode(errors="replace")

    shown = {id: Logprob(found.logprob, found.rank, text(id))}
    for rank, (other, logprob) in enumerate(found.top, start=1):
        shown.setdefault(other, Logprob(logprob, rank if ranked else None, text(other)))
    return shown


def prompt_logprobs(generation: Generation) -> list[dict[int, Logprob] | None] | None:
    first = generation.choices[0]
    if generation.options.prompt_logprobs is None or not isinstance(first, PromptChoice):
        return None
    return [None if found is None else _shown(generation.tokenizer, id, found) for id, found in first.prompt_logprobs]


def best_first(generation: Generation, wholes: Sequence[CompletionOutput]) -> list[CompletionOutput]:
    return [dataclasses.replace(wholes[index], index=place) for place, index in enumerate(generation.best)]


# --- beam search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of `SamplingParams` for a beam search. They request `logprobs`, because the sum of log-probabilities ranks the
        beams."""
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
    """Beam of a search. `tokens`, `text`: prompt and answer together. `logprobs`: log-probabilities for each token of the
    answer. `cum_logprob`: their sum."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class BeamSearchOutput:
    """Beams of one prompt, best first."""

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
