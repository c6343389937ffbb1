"""Creation of a model on the devices of this process. Each rank runs on its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.config import EngineConfig
from runtime.parallel.group import Group, HostRank
from runtime.parallel.links import AgreeingRank, StageLinks, ThreadLine
from runtime.parallel.runners import RankRunners
from runtime.parallel.stage_runners import StageRunners
from runtime.parallel.stages import PipelineStage
from runtime.platform.platform import Report
from runtime.runner.rank_worker import RankWorker, on_every_rank
from runtime.start.build import EngineParts, Running, build_alone, build_rank, encode_first_items
from runtime.start.plan import Planned, SharedDevice, plan_engine
from runtime.step import Runner
from runtime.weights.fetch import ModelFiles

if TYPE_CHECKING:
    from runtime.models.expert_load import ExpertLoad
    from runtime.models.model import Model


async def build_parts(
    config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None, device: SharedDevice
) -> EngineParts:
    """Build a model on the devices of this process: one rank, or several."""
    if config.num_devices > 1:
        return await _build_on_ranks(config, files, report, draft, device)
    worker = device.worker()
    try:
        running = await worker.run(lambda: build_alone(config, files, worker, report, draft, device))
        await encode_first_items(running, device.platform(config.device), report)
        parts = await worker.run(lambda: running.assembled(config.cache_key))
        return replace(parts, expert_load=expert_load(config, [running.model]))
    except BaseException:
        await worker.close()
        raise


class OwnRanks:
    """Ranks of this process. They compute all stages of a model, or one stage, connected to the other stages by `links`.

    Each rank has its own thread, which loads its part of the model and computes its part of every step."""

    def __init__(
        self, config: EngineConfig, first: int, numbers: Sequence[int], links: StageLinks | None = None
    ) -> None:
        """Create the threads of the ranks. `first`: number of the first rank's device. `numbers`: numbers of the stages."""
        self.size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self._groups = [Group(self.size) for _ in numbers]
        self._everyone = Group(self.size * len(numbers))
        self._links = links
        self._lines = [ThreadLine(num_stages) for _ in range(self.size)] if num_stages > 1 and links is None else []
        self.by_stage = [
            [self._worker(group, stage, number, first + place * self.size + number) for number in range(self.size)]
            for place, (stage, group) in enumerate(zip(numbers, self._groups, strict=True))
        ]
        self._first = first
        self.workers = [worker for stage in self.by_stage for worker in stage]

    def _worker(self, group: Group, stage: int, number: int, device: int) -> RankWorker:
        if self._links is not None:
            agreeing = AgreeingRank(group, number, device, self._links.agreement)
            return RankWorker(agreeing, self._links.ways[number])
        if not self._lines:
            return RankWorker(HostRank(group, number, device))
        of_all = HostRank(self._everyone, stage * self.size + number)
        return RankWorker(HostRank(group, number, device, of_all), self._lines[number].ways(stage))

    async def build(
        self, config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None, device: SharedDevice
    ) -> list[list[Running]]:
        """Plan, load and warm up the model. Return a `Running` for each rank, grouped by stage."""
        workers = self.workers

        def rank(planned: Planned, worker: RankWorker) -> Running:
            reports = report if worker is workers[0] else lambda progress: None
            return build_rank(planned, files, worker, reports, draft, worker.rank)

        planned = await workers[0].run(lambda: plan_engine(config, files, report, draft, device))
        planned.platform.compile_ahead(planned.plan)
        every = await on_every_rank(workers, lambda worker: rank(planned, worker))
        return [every[first : first + self.size] for first in range(0, len(every), self.size)]

    def runners(self, ranks: Sequence[Sequence[Running]]) -> list[Runner]:
        """Return one runner for each stage."""
        return [
            each[0].runner if self.size == 1 else RankRunners([one.runner for one in each], group.end)
            for each, group in zip(ranks, self._groups, strict=True)
        ]

    @property
    def stages(self) -> list[list[PipelineStage]]:
        """All ranks' `PipelineStage` objects, grouped by stage."""
        return [[worker.stage for worker in stage if worker.stage is not None] for stage in self.by_stage]

    def end(self) -> None:
        """Fail all waits of ranks and stages for each other."""
        for group in (*self._groups, self._everyone):
            group.end()
        for line in self._lines:
            line.end()

    async def close(self) -> None:
        self.end()
        await asyncio.gather(*(worker.close() for worker in self.workers))


async def _build_on_ranks(
    config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None, device: SharedDevice
) -> EngineParts:
    own = OwnRanks(config, device.first, range(config.pipeline_parallel_size))
    try:
        ranks = await own.build(config, files, report, draft, device)
        runners = own.runners(ranks)
        running = ranks[-1][0]._replace(runner=runners[0])
        if len(runners) > 1:
            stages = StageRunners(runners, own.stages, running.plan.steps_in_flight, own.end)
            running = running._replace(runner=stages)
        await encode_first_items(running, device.platform(config.device), report)
    except BaseException:
        await own.close()
        raise
    shards, every = [each.model for each in ranks[-1]], [each for stage in ranks for each in stage]
    parts = running.assembled(config.cache_key, shards)
    facts = replace(
        parts.model,
        weights_bytes=sum(each.model.weights_bytes for each in every),
        kv_cache_bytes=parts.model.kv_cache_bytes * len(every),
    )
    return replace(parts, model=facts, expert_load=expert_load(config, [stage[0].model for stage in ranks]))


def expert_load(config: EngineConfig, models: Sequence[Model]) -> ExpertLoad | None:
    """Return counters of tokens per expert, or None. `models`: those of each stage's first rank; other ranks route equally."""
    if not config.enable_expert_distribution_metrics:
        return None
    from runtime.models.expert_load import ExpertLoad
    from runtime.models.pair import ModelPair

    counts = [getattr(each.model if isinstance(each, ModelPair) else each, "expert_counts", {}) for each in models]
    return ExpertLoad(counts, config.tensor_parallel_size if config.enable_expert_parallel else 1)
