"""Workloads as data: arrivals, prompts and output lengths. Prompts are drawn from a seed.

Names: `c16`, `shared512` and the other CPU rows; `edit`, whose answers repeat their prompts; `c32_512_128` (streams_prompt_output,
in tokens) for the GPU, `c32_2048+128_64` with a shared prefix before the `+`, `b512_1000-4000_64-256` for a burst of 512 at once,
`p40_256_256` for Poisson arrivals at 40 a second, `m16_6_40_~100` for 16 concurrent conversations of 6 turns, 40 words each, with
lengths in the format of `lengths.Lengths.parse`; application workloads: `rag`, `agents`, `structured`, `embeddings`; or a group,
`cpu` or `gpu`.

Requests of a workload share no prefix except the declared one, so a prefix cache helps only in workloads that declare a prefix."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from loadtests.answers import Endpoint
from loadtests.applications import (
    AgentPrompt,
    Application,
    DocumentsPrompt,
    EmbeddingPrompt,
    StructuredPrompt,
    TurnsPrompt,
)
from loadtests.arrivals import Arrivals, Poisson
from loadtests.conversations import Dialogue, body_of
from loadtests.lengths import Lengths
from loadtests.trace import TracePrompt
from loadtests.words import WORDS, drawn, story

MAX_REQUESTS, MAX_CONCURRENCY, MAX_TOKENS = 100_000, 4096, 8_000_000
_REPEAT_STRIDE, _WARMUP_SEED, _PREFIX_SEED, _OUTPUT_SEED = 7919, 104_729, 15_485_863, 32_452_843
_SENTENCES = (
    "The {} stood near the {} until the {} came.",
    "Every {} has a {}, and no {} has two.",
    "In the {} we saw a {} and a small {}.",
    "A {} is not a {}, said the {}.",
)


class UnknownWorkload(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class WordPrompt:
    """Prompt of English words for the chat endpoint: a system message of `num_shared_words`, then `num_words` unshared words."""

    num_words: int
    num_shared_words: int = 0

    def describe(self) -> str:
        return f"{self.num_shared_words}+{self.num_words} words" if self.num_shared_words else f"{self.num_words} words"


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Prompt of random token ids in [first_id, vocab_size) for the completions endpoint. Special tokens are usually below 100."""

    num_tokens: Lengths
    num_shared_tokens: int = 0
    vocab_size: int = 49_152
    first_id: int = 100

    def describe(self) -> str:
        return f"{self.num_shared_tokens}+{self.num_tokens} ids" if self.num_shared_tokens else f"{self.num_tokens} ids"


@dataclass(frozen=True, slots=True)
class EditPrompt:
    """Prompt with a text of `num_sentences` sentences and the beginning of its second version, for the completions endpoint. The
    answer repeats much of the prompt, as in editing, which speculative decoding speeds up most."""

    num_sentences: int

    def describe(self) -> str:
        return f"texts of {self.num_sentences} sentences to edit"


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of a run. `arrivals` None: `concurrency` streams, each of which sends its next request when the last one has
    ended (closed loop). Otherwise requests are sent when they arrive, with at most `concurrency` in flight (open loop). Warm-up
    requests come first, one by one. A dialogue counts as its turns: `num_requests` is the total of all turns."""

    name: str
    prompt: WordPrompt | TokenPrompt | EditPrompt | TracePrompt | Application
    concurrency: int
    num_requests: int
    num_output_tokens: Lengths
    seed: int = 0
    num_warmup: int = 0
    arrivals: Arrivals | None = None
    endpoint: Endpoint = "chat"

    def __post_init__(self) -> None:
        if not 1 <= self.num_requests <= MAX_REQUESTS or not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ValueError(f"{self.name}: 1 to {MAX_REQUESTS} requests and 1 to {MAX_CONCURRENCY} at a time")
        if self.num_requests * self.num_output_tokens.high > MAX_TOKENS:
            raise ValueError(f"{self.name}: requests times output tokens must be at most {MAX_TOKENS}")
        if isinstance(self.prompt, TokenPrompt):
            if self.endpoint != "completions":
                raise ValueError(f"{self.name}: prompts of token ids go to the completions endpoint only")
            if self.prompt.vocab_size <= self.prompt.first_id:
                raise ValueError(f"{self.name}: the vocabulary must be larger than {self.prompt.first_id}")
        elif isinstance(self.prompt, WordPrompt | EditPrompt):
            if self.endpoint == "embeddings":
                raise ValueError(f"{self.name}: use the workload named embeddings")
        elif self.endpoint not in self.prompt.endpoints:
            raise ValueError(f"{self.name}: this goes to the {self.prompt.endpoints[0]} endpoint only")
        if self.num_requests % self.num_turns:
            raise ValueError(f"{self.name}: {self.num_requests} requests are no dialogues of {self.num_turns}")

    def describe(self) -> str:
        arrivals = self.arrivals.describe() if self.arrivals else f"{self.concurrency} streams"
        if self.endpoint == "embeddings":
            return f"{self.num_requests} requests, {arrivals}, {self.prompt.describe()}"
        return f"{self.num_requests} requests, {arrivals}, {self.prompt.describe()} in, {self.num_output_tokens} tokens out"

    def repeated(self, index: int) -> Workload:
        """Return the workload with different prompts. `index`: number of the run against one server."""
        return replace(self, seed=self.seed + index * _REPEAT_STRIDE)

    def warmup(self) -> Workload | None:
        """Return the warm-up before the measured run, with different prompts that are sent one by one; None if there is none."""
        if not self.num_warmup:
            return None
        return replace(
            self,
            num_requests=self.num_warmup * self.num_turns,
            seed=self.seed + _WARMUP_SEED,
            num_warmup=0,
            concurrency=1,
            arrivals=None,
        )

    def scaled(self, share: float) -> Workload:
        """Return the workload with the fraction `share` of its requests, for a slow server."""
        return replace(self, num_requests=max(1, round(self.num_arrivals * share)) * self.num_turns)

    @property
    def num_turns(self) -> int:
        """Return the number of requests that each arrival sends: the turns of a dialogue, or 1."""
        return 1 if isinstance(self.prompt, WordPrompt | TokenPrompt | EditPrompt) else self.prompt.num_turns

    @property
    def num_arrivals(self) -> int:
        return self.num_requests // self.num_turns

    @property
    def ends_by_itself(self) -> bool:
        """Return whether answers end by themselves instead of at the requested length."""
        return "ignore_eos" in self._withheld

    @property
    def _withheld(self) -> frozenset[str]:
        return frozenset() if isinstance(self.prompt, WordPrompt | TokenPrompt | EditPrompt) else self.prompt.withholds

    def arrivals_s(self) -> list[float]:
        """Return the sending time of each request or dialogue of an open loop, in seconds after the first."""
        assert self.arrivals is not None
        return self.arrivals.moments_s(self.num_arrivals, random.Random(self.seed + 1))

    def bodies(
        self, model: str, ignore_eos: bool = True, extra: Mapping[str, Any] | None = None
    ) -> list[bytes] | list[Dialogue]:
        """Return the JSON body of each request, or dialogues. `extra`: fields that are merged in last; None removes a field."""
        common: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            common["ignore_eos"] = True
        merged = {name: value for name, value in common.items() if name not in self._withheld} | dict(extra or {})
        if isinstance(self.prompt, WordPrompt | TokenPrompt | EditPrompt):
            return [
                body_of({"max_tokens": length} | merged | self._prompt_field(prompt))
                for prompt, length in zip(self.prompts(), self.output_lengths(), strict=True)
            ]
        return self.prompt.scripts(self.seed, self.output_lengths(), merged)

    def output_lengths(self) -> list[int]:
        """Return the requested length of each answer in output tokens."""
        if isinstance(self.prompt, TracePrompt):
            return [each.num_output_tokens for each in self.prompt.recorded[: self.num_requests]]
        rng = random.Random(self.seed + _OUTPUT_SEED)
        return [self.num_output_tokens.draw(rng) for _ in range(self.num_requests)]

    def _prompt_field(self, prompt: tuple[str, str] | list[int]) -> dict[str, Any]:
        if isinstance(prompt, list):
            return {"prompt": prompt}
        system, user = prompt
        if self.endpoint == "completions":
            return {"prompt": f"{system}\n{user}" if system else user}
        messages = [{"role": "user", "content": user}]
        return {"messages": [{"role": "system", "content": system}, *messages] if system else messages}

    def prompts(self) -> Sequence[tuple[str, str] | list[int]]:
        """Return prompts as (system or "", user) pairs, or as lists of token ids. Applications make their own."""
        rng, prefix_rng = random.Random(self.seed), random.Random(self.seed + _PREFIX_SEED)
        shape = self.prompt
        assert isinstance(shape, WordPrompt | TokenPrompt | EditPrompt)
        if isinstance(shape, TokenPrompt):
            ids = range(shape.first_id, shape.vocab_size)
            prefix = prefix_rng.choices(ids, k=shape.num_shared_tokens)
            return [prefix + rng.choices(ids, k=shape.num_tokens.draw(rng)) for _ in range(self.num_requests)]
        if isinstance(shape, EditPrompt):
            return [("", _edit(rng, shape.num_sentences)) for _ in range(self.num_requests)]
        system = drawn(prefix_rng, shape.num_shared_words)
        return [(system, story(rng, shape.num_words)) for _ in range(self.num_requests)]


def _edit(rng: random.Random, num_sentences: int) -> str:
    sentences = [rng.choice(_SENTENCES).format(*rng.choices(WORDS, k=3)) for _ in range(num_sentences)]
    old, new = rng.sample(WORDS, 2)
    return (
        f"({rng.randrange(100_000, 1_000_000)}) The first version of the text:\n\n{' '.join(sentences)}\n\n"
        f'The second version, in which "{old}" is called "{new}":\n\n'
    )


CPU: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            "c1", WordPrompt(82), concurrency=1, num_requests=8, num_output_tokens=Lengths(64, 64), seed=1, num_warmup=1
        ),
        Workload("c4", WordPrompt(82), concurrency=4, num_requests=16, num_output_tokens=Lengths(64, 64), seed=2),
        Workload("c16", WordPrompt(82), concurrency=16, num_requests=32, num_output_tokens=Lengths(64, 64), seed=3),
        Workload(
            "shared512", WordPrompt(20, 512), concurrency=4, num_requests=16, num_output_tokens=Lengths(64, 64), seed=4
        ),
        Workload(
            "unshared512", WordPrompt(532), concurrency=4, num_requests=8, num_output_tokens=Lengths(64, 64), seed=5
        ),
    )
}
OTHERS: Mapping[str, Workload] = {
    "edit": Workload(
        "edit",
        EditPrompt(12),
        concurrency=1,
        num_requests=8,
        num_output_tokens=Lengths(128, 128),
        seed=6,
        num_warmup=1,
        endpoint="completions",
    ),
    "rag": Workload(
        "rag",
        DocumentsPrompt(150, 4),
        concurrency=16,
        num_requests=64,
        num_output_tokens=Lengths.parse("~60"),
        seed=7,
        num_warmup=1,
    ),
    "agents": Workload(
        "agents",
        AgentPrompt(Lengths.parse("~60"), 8),
        concurrency=16,
        num_requests=256,
        num_output_tokens=Lengths.parse("~30"),
        seed=8,
        num_warmup=1,
    ),
    "structured": Workload(
        "structured",
        StructuredPrompt(60),
        concurrency=16,
        num_requests=64,
        num_output_tokens=Lengths(200, 200),
        seed=9,
        num_warmup=1,
    ),
    "embeddings": Workload(
        "embeddings",
        EmbeddingPrompt(Lengths(10, 120)),  # no more than what small models take: 256 tokens
        concurrency=16,
        num_requests=256,
        num_output_tokens=Lengths(1, 1),
        seed=10,
        num_warmup=1,
        endpoint="embeddings",
    ),
}
GPU_REQUESTS: Mapping[str, int] = {
    "c1_128_128": 12,
    "c32_512_128": 192,
    "c128_512_128": 640,
    "c256_256_256": 768,
    "c32_2048+128_64": 192,
    "b512_1000-4000_64-256": 512,
}
ALIASES: Mapping[str, str] = {
    "prefix": "c32_2048+128_64",
    "burst": "b512_1000-4000_64-256",
    "chat": "c256_~200_~200",
    "turns": "m64_6_~50_~100",
}
_LENGTHS = r"\d+(?:-\d+)?|~\d+"
_PATTERN = re.compile(rf"([bcp])(\d+)_(?:(\d+)\+)?({_LENGTHS})_({_LENGTHS})")
_TURNS = re.compile(rf"m(\d+)_(\d+)_({_LENGTHS})_({_LENGTHS})")
_POISSON_S = 20  # of arrivals, at least


def find_workloads(names: Iterable[str], vocab_size: int = 49_152) -> list[Workload]:
    """Return workloads by name, pattern or group, in the given order and without repetition. Raises UnknownWorkload, ValueError."""
    groups = {"cpu": list(CPU), "gpu": list(GPU_REQUESTS)}
    flat = [member for name in names for member in groups.get(name, [name])]
    return [_find(name, vocab_size) for name in dict.fromkeys(ALIASES.get(name, name) for name in flat)]


def _find(name: str, vocab_size: int) -> Workload:
    if named := CPU.get(name) or OTHERS.get(name):
        return named
    if match := _TURNS.fullmatch(name):
        streams, turns, words, output = match.groups()
        return Workload(
            name,
            TurnsPrompt(Lengths.parse(words), int(turns)),
            int(streams),
            2 * int(streams) * int(turns),
            Lengths.parse(output),
            seed=crc32(name.encode()),
            num_warmup=1,
        )
    match = _PATTERN.fullmatch(name)
    if match is None:
        known = ", ".join(["cpu", "gpu", *CPU, *OTHERS, *GPU_REQUESTS, *ALIASES])
        raise UnknownWorkload(
            f"no workload {name!r}; known: {known}, and any cSTREAMS_PROMPT_OUTPUT, bBURST_..., pRATE_... or "
            "mSTREAMS_TURNSWORDS_OUTPUT"
        )
    arrivals, count, shared, own, output = match.groups()
    if not int(count):
        raise UnknownWorkload(f"workload {name!r} has no requests")
    num_requests = {"b": int(count), "c": max(12, 6 * int(count)), "p": max(100, _POISSON_S * int(count))}[arrivals]
    return Workload(
        name,
        TokenPrompt(Lengths.parse(own), int(shared or 0), vocab_size),
        min(num_requests, MAX_CONCURRENCY) if arrivals == "p" else int(count),
        GPU_REQUESTS.get(name, num_requests),
        Lengths.parse(output),
        # By name, so that no workload's prompts begin those of another: a prefix cache would find them.
        seed=crc32(name.encode()),
        num_warmup=2,
        arrivals=Poisson(float(count)) if arrivals == "p" else None,
        endpoint="completions",
    )
