"""Several shards of a model as one, on one machine: each is a decoder on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from runtime.models.decoder import Decoder
from runtime.models.load import load_model
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.sharding import sharded
from runtime.parallel.group import Group, HostRank
from runtime.weights.rules import Checkpoint


class Shards:
    """`parts`: for each rank, what `made` makes of its decoder, made for contexts of 128 tokens at most."""

    def __init__(self, spec: DecoderSpec, files: Checkpoint, size: int, made: Callable[[Decoder], object]) -> None:
        group = Group(size)
        self._ranks = [HostRank(group, number) for number in range(size)]

        def load(rank: HostRank) -> object:
            part = sharded(spec, rank.number, size)
            return made(
                load_model(
                    files,
                    dtype="float32",
                    load_format="auto",
                    seed=0,
                    progress=lambda progress: None,
                    max_model_len=128,
                    spec=part,
                    peers=rank,
                )
            )

        self.parts = [load(rank) for rank in self._ranks]

    def run(self, work: Callable[[object], object]) -> list:
        """What `work` gives of each rank's part, at once."""

        def of(rank: HostRank) -> object:
            meeting = rank.group.claim(rank.number)
            return rank.within(meeting, lambda: work(self.parts[rank.number]))

        with ThreadPoolExecutor(len(self._ranks)) as pool:
            return list(pool.map(of, self._ranks))


def all_alike(values: Sequence[Tensor]) -> bool:
    return all(torch.equal(each, values[0]) for each in values)
