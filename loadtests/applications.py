"""Application workloads: multi-turn chats, RAG questions, agents with tools, structured outputs, embeddings and recorded
traces. Each defines its endpoint and draws its requests from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from loadtests.answers import Endpoint
from loadtests.conversations import AgentRun, Conversation, Dialogue, ToolCall, body_of
from loadtests.lengths import Lengths
from loadtests.words import WORDS, drawn, number, story

Fields = Mapping[str, Any]
_SHARED_SEED = 15_485_863  # what requests have in common is drawn apart from what is their own


class Application(Protocol):
    """Workload of an application. `endpoints`: supported endpoints. `num_turns`: number of requests of one dialogue.
    `withholds`: names of common request fields that it does not send."""

    endpoints: ClassVar[tuple[Endpoint, ...]]
    withholds: ClassVar[frozenset[str]]

    @property
    def num_turns(self) -> int: ...

    def describe(self) -> str: ...

    def scripts(self, seed: int, lengths: Sequence[int], fields: Fields) -> list[bytes] | list[Dialogue]:
        """Return the requests or dialogues. `lengths`: output length of each request, in tokens. A dialogue has `num_turns`
        requests."""
        ...


@dataclass(frozen=True, slots=True)
class TurnsPrompt:
    """Multi-turn chats. Every turn adds `num_words` English words to all earlier turns and answers."""

    num_words: Lengths
    num_turns: int
    endpoints: ClassVar[tuple[Endpoint, ...]] = ("chat",)
    withholds: ClassVar[frozenset[str]] = frozenset()

    def describe(self) -> str:
        return f"conversations of {self.num_turns} turns, {self.num_words} words each"

    def scripts(self, seed: int, lengths: Sequence[int], fields: Fields) -> list[Dialogue]:
        rng = random.Random(seed)
        return [
            Conversation(fields, [story(rng, self.num_words.draw(rng)) for _ in part], part)
            for part in _parts(lengths, self.num_turns)
        ]


@dataclass(frozen=True, slots=True)
class DocumentsPrompt:
    """Questions on documents (RAG). A prompt has fixed instructions, `num_documents` of `library` documents in retrieval order,
    and an unshared question. The k-th most popular document is drawn with weight 1/k. Requests share a prefix only if their
    first documents are equal, as in production."""

    num_words: int
    num_documents: int
    library: int = 64
    num_turns: ClassVar[int] = 1
    endpoints: ClassVar[tuple[Endpoint, ...]] = ("chat",)
    withholds: ClassVar[frozenset[str]] = frozenset()

    def describe(self) -> str:
        return f"{self.num_documents} of {self.library} documents of {self.num_words} words and a question"

    def scripts(self, seed: int, lengths: Sequence[int], fields: Fields) -> list[bytes]:
        rng, shared = random.Random(seed), random.Random(seed + _SHARED_SEED)
        library = [f"[{number}] {drawn(shared, self.num_words)}" for number in range(1, self.library + 1)]
        system = "Answer from these documents only, and name those that you used."
        bodies = []
        for length in lengths:
            found = self._found(rng, library)
            question = f"{number(rng)} What do they say of {drawn(rng, 8)}?"
            messages = [
                {"role": "system", "content": "\n\n".join([system, *found])},
                {"role": "user", "content": question},
            ]
            bodies.append(body_of({"max_tokens": length, **fields, "messages": messages}))
        return bodies

    def _found(self, rng: random.Random, library: Sequence[str]) -> list[str]:
        weights = [1 / rank for rank in range(1, len(library) + 1)]
        found: dict[str, None] = {}
        while len(found) < min(self.num_documents, len(library)):
            found.setdefault(rng.choices(library, weights)[0])
        return list(found)


_TOOLS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("read_file", "Read a file of the project, or some lines of it.", ("path", "lines")),
    ("search", "Search all files for a text.", ("text", "folder")),
    ("edit_file", "Replace a text in a file by another.", ("path", "old", "new")),
    ("run", "Run a command in a shell, and give what it printed.", ("command",)),
    ("list_folder", "List the files of a folder.", ("path",)),
    ("ask", "Ask the user a question.", ("question",)),
)


def _tool(name: str, text: str, parameters: Sequence[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": {each: {"type": "string"} for each in parameters}}
    function = {"name": name, "description": text, "parameters": schema | {"required": [parameters[0]]}}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class AgentPrompt:
    """Agents with tools. A prompt has six tools and long instructions shared by all, and a task. Each of `num_turns` requests
    appends a tool call and its result of `num_words` words, so the prompt only grows. Answers are short."""

    num_words: Lengths
    num_turns: int
    num_shared_words: int = 400
    endpoints: ClassVar[tuple[Endpoint, ...]] = ("chat",)
    withholds: ClassVar[frozenset[str]] = frozenset()

    def describe(self) -> str:
        return f"agents of {self.num_turns} turns, results of {self.num_words} words"

    def scripts(self, seed: int, lengths: Sequence[int], fields: Fields) -> list[Dialogue]:
        rng, shared = random.Random(seed), random.Random(seed + _SHARED_SEED)
        system = f"You are an agent that works on a program with tools. {drawn(shared, self.num_shared_words)}"
        tools = {"tools": [_tool(*each) for each in _TOOLS]}
        return [
            AgentRun(
                tools | dict(fields),
                system,
                f"{number(rng)} Mend this: {drawn(rng, 40)}",
                [self._call(rng) for _ in part[1:]],
                part,
            )
            for part in _parts(lengths, self.num_turns)
        ]

    def _call(self, rng: random.Random) -> ToolCall:
        name, _, parameters = rng.choice(_TOOLS)
        return ToolCall(name, {each: drawn(rng, 3) for each in parameters}, drawn(rng, self.num_words.draw(rng)))


@dataclass(frozen=True, slots=True)
class StructuredPrompt:
    """Structured outputs by JSON schema. Each request uses one of `num_schemas` schemas of two to nine properties, as if several
    programs used the server. An answer ends when its JSON is complete, or at the requested length."""

    num_words: int
    num_schemas: int = 8
    num_turns: ClassVar[int] = 1
    endpoints: ClassVar[tuple[Endpoint, ...]] = ("chat",)
    withholds: ClassVar[frozenset[str]] = frozenset({"ignore_eos"})

    def describe(self) -> str:
        return f"{self.num_words} words to put in one of {self.num_schemas} JSON forms"

    def scripts(self, seed: int, lengths: Sequence[int], fields: Fields) -> list[bytes]:
        rng, shared = random.Random(seed), random.Random(seed + _SHARED_SEED)
        schemas = [self._schema(shared, number) for number in range(self.num_schemas)]
        bodies = []
        for length in lengths:
            form = {"type": "json_schema", "json_schema": rng.choice(schemas)}
            text = f"{number(rng)} Put this in the form that was asked for: {drawn(rng, self.num_words)}"
            messages = [{"role": "user", "content": text}]
            bodies.append(body_of({"max_tokens": length, "response_format": form, **fields, "messages": messages}))
        return bodies

    def _schema(self, rng: random.Random, number: int) -> dict[str, Any]:
        kinds: Sequence[dict[str, Any]] = (
            {"type": "string", "maxLength": 40},
            {"type": "integer"},
            {"type": "boolean"},
            {"enum": rng.sample(WORDS, 4)},
            {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        )
        names = rng.sample(WORDS, rng.randint(2, 9))
        properties = {name: rng.choice(kinds) for name in names}
        schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        return {"name": f"form_{number}", "schema": schema, "strict": True}


@dataclass(frozen=True, slots=True)
class EmbeddingPrompt:
    """Embeddings requests with `num_texts` texts each. Latency and input tokens are measured."""

    num_words: Lengths
    num_texts: int = 1
    num_turns: ClassVar[int] = 1
    endpoints: ClassVar[tuple[Endpoint, ...]] = ("embeddings",)
    withholds: ClassVar[frozenset[str]] = frozenset({"ignore_eos", "temperature", "stream", "stream_options"})

    def describe(self) -> str:
        return f"{self.num_texts} text(s) of {self.num_words} words to embed"

    def scripts(self, seed: int, lengths: Sequence[int], fields: Fields) -> list[bytes]:
        rng = random.Random(seed)
        texts = (
            [f"{number(rng)} {drawn(rng, self.num_words.draw(rng))}" for _ in range(self.num_texts)] for _ in lengths
        )
        return [body_of({**fields, "input": each}) for each in texts]


def _parts(lengths: Sequence[int], size: int) -> list[Sequence[int]]:
    return [lengths[at : at + size] for at in range(0, len(lengths), size)]
