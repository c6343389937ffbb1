"""Choice of a replica. One with the prompt's prefix in its cache is preferred, unless it is busier than others. Else the less busy
of two random replicas.

Texts are compared instead of token ids, because the ingress has no tokenizer. A body is hashed in chunks of CHUNK_BYTES, from
the start of the prompt. Each hash includes all earlier chunks. Independent of Ray; `choose` is a pure function."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TypeVar

Replica = TypeVar("Replica")

CHUNK_BYTES = 256  # some 60 tokens: four blocks of a usual cache
MAX_CHUNKS = 128  # 32 KiB: prompts that are the same up to there have most of their work in common
MAX_HOMES = 1 << 17  # names that are remembered: some 20 MB
NAME_BYTES = 12
SEARCHED_BYTES = 1 << 18  # of a body; what is looked for comes early, or behind pictures
# Fields that contain the prompt; the first match is its start, regardless of the order of fields.
_PROMPT = re.compile(rb'"(?:messages|prompt|input|system|instructions|query|documents|input_prefix)"\s*:')
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,256})"')  # adapters share no blocks


def prefixes_of(body: bytes, owner: bytes = b"") -> tuple[bytes, ...]:
    """Return hashes of the prefixes of a JSON body's prompt, the shortest first. () if the prompt is shorter than a chunk.
    `owner`: owner of the KV cache blocks, part of each hash."""
    found = _PROMPT.search(body, 0, SEARCHED_BYTES)
    if found is None:
        return ()
    model = _MODEL.search(body, 0, SEARCHED_BYTES)
    name = blake2b(owner + b"\0" + (b"" if model is None else model[1]), digest_size=NAME_BYTES).digest()
    names = []
    start = found.start()
    for end in range(start + CHUNK_BYTES, min(len(body), start + MAX_CHUNKS * CHUNK_BYTES) + 1, CHUNK_BYTES):
        name = blake2b(body[end - CHUNK_BYTES : end], key=name, digest_size=NAME_BYTES).digest()
        names.append(name)
    return tuple(names)


class Homes:
    """Map from prompt prefixes to the replica that last served each prefix. The least recently used prefixes are evicted."""

    def __init__(self, limit: int = MAX_HOMES) -> None:
        self._limit = limit
        self._home: OrderedDict[bytes, str] = OrderedDict()

    def note(self, prefixes: Sequence[bytes], replica: str) -> None:
        for name in prefixes:
            self._home[name] = replica
            self._home.move_to_end(name)
        while len(self._home) > self._limit:
            self._home.popitem(last=False)

    def find(self, prefixes: Sequence[bytes], among: Mapping[str, object]) -> str | None:
        """Return the replica in `among` that served the longest of `prefixes`, or None."""
        for name in reversed(prefixes):
            home = self._home.get(name)
            if home is not None and home in among:
                return home
        return None


def choose(
    home: Replica | None, ongoing: Mapping[Replica, int], spare: float, two_of: Callable[[Sequence[Replica]], list[Replica]]
) -> list[list[Replica]]:  # fmt: skip
    """Return lists of replicas, to be tried in order. Within a list, the least busy replica is used. `home`: replica with the
    prompt's prefix, if any. `ongoing`: number of requests in flight at each replica. `spare`: number of requests that `home` may
    have in addition to those of the least busy replica. `two_of`: picks two replicas at random, or all if there are fewer."""
    if not ongoing:
        return []
    two = two_of([*ongoing])
    if home is None or home not in ongoing or ongoing[home] > min(ongoing.values()) + spare:
        return [two]
    others = [each for each in two if each != home]
    return [[home], others] if others else [[home]]
