"""Creation of the runner and the scheduler of one rank."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from runtime.api import LoadProgress, ModelInfo
from runtime.config import EngineConfig, EnginePlan
from runtime.encode.first_items import encode_first
from runtime.features import features_of, takes_embeds
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.lora.adapters import Adapters
from runtime.models.implementation import load
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec, PairSpec
from runtime.models.spec.stages import keeps_embedding
from runtime.parallel.group import HostRank, Peers
from runtime.parallel.stages import StageIO
from runtime.platform.platform import Platform, Report
from runtime.runner.rank_worker import RankWorker
from runtime.runner.worker import Worker
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.start.plan import Planned, SharedDevice, parts_of, plan_engine
from runtime.step import Runner
from runtime.weights.fetch import ModelFiles

if TYPE_CHECKING:
    from runtime.models.expert_load import ExpertLoad
    from runtime.models.model import Model
    from runtime.models.spec.model import ModelSpec

log = logging.getLogger("oneloop.start")

_MORE_ADAPTERS_READY = 8  # in addition to those in slots, so that adapters can be loaded while all slots are in use


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Objects of an Engine, created before it runs on an event loop."""

    scheduler: Scheduler
    runner: Runner
    model: ModelInfo
    plan: EnginePlan
    adapters: Adapters | None = None
    expert_load: ExpertLoad | None = None


class Running(NamedTuple):
    """Loaded model with a runner that has been warmed up."""

    plan: EnginePlan
    model: Model
    eos_token_ids: frozenset[int]
    runner: Runner

    def assembled(self, cache_key: bytes | None, shards: Sequence[Model] = ()) -> EngineParts:
        """Create a scheduler and return all objects. `shards`: models of all ranks; `model` is the first of them."""
        import ops

        parts = assemble(*self, cache_key=cache_key, shards=shards)
        for line in (*ops.describe(usual=False), *self.plan.notes):
            log.info(line)
        return parts


def build_alone(
    config: EngineConfig, files: ModelFiles, worker: Worker, report: Report, draft: ModelFiles | None,
    device: SharedDevice,
) -> Running:  # fmt: skip
    """Plan, load and warm up a model that has one rank. Called on the thread that will compute its steps."""
    planned = plan_engine(config, files, report, draft, device)
    planned.platform.compile_ahead(planned.plan)
    return build_rank(planned, files, worker, report, draft)


async def encode_first_items(running: Running, platform: Platform, report: Report) -> None:
    """Encode the largest media items, to compile and capture the encoder. Errors are only logged."""
    plan, model = running.plan, running.model
    if model.encoder is None:
        return
    from runtime.runner.warmup import prompts

    try:
        if not (items := await asyncio.to_thread(platform.first_items, model.encoder, plan)):
            return
        num = min(len(items[0][0].positions), plan.max_num_batched_tokens, plan.max_model_len - 2)
        prompt = (
            prompts([num], plan.layout, plan.num_kv_blocks)
            if model.spec.generates and not plan.layout.in_one_step
            else None
        )
        crosses = model.encoder.spec.num_outputs > 0
        await encode_first(running.runner, items, prompt, report, crosses=crosses)
    except Exception:  # a lost device is reported again by the first request
        log.warning("the encoder was not warmed up: its first image or audio may take longer", exc_info=True)


def build_rank(
    planned: Planned, files: ModelFiles, worker: Worker, report: Report, draft: ModelFiles | None,
    rank: HostRank | None = None,
) -> Running:  # fmt: skip
    """Load and warm up the model, or the shard of `rank`. Called on the thread that will compute its steps."""
    platform = planned.platform
    with platform.out_of_memory_is("the model needs a larger device, or a smaller dtype"):
        peers = None if rank is None else platform.join(rank)
        if rank is not None:
            assert isinstance(worker, RankWorker)
            planned = _of_rank(planned, worker)
        model = _loaded(planned, files, report, draft, peers, worker.stage if isinstance(worker, RankWorker) else None)
    eos_token_ids = files.eos_token_ids | planned.config.end_token_ids
    report(LoadProgress("warm-up"))
    runner, plan = platform.build_runner(planned.config, planned.plan, model, eos_token_ids, worker, report)
    return Running(plan, model, eos_token_ids, runner)


def _of_rank(planned: Planned, worker: RankWorker) -> Planned:
    """Return the plan of the worker's shard, and create its pipeline stage if there are several. Its rank must have joined."""
    ways, plan = worker.ways, planned.plan
    spec = parts_of(planned.config, planned.whole, worker.rank.number)[worker.stage_number]
    # Other processes have planned with their hosts' memory.
    num_blocks, max_model_len = map(worker.rank.least, (plan.num_kv_blocks, plan.max_model_len))
    plan = replace(plan, num_kv_blocks=num_blocks, max_model_len=max_model_len).for_layers(spec.memory_kinds())
    if ways is not None:
        described = spec.model if isinstance(spec, PairSpec) else spec
        assert isinstance(described, DecoderSpec), "others are not cut"
        num_tensors = 3 if keeps_embedding(described.all_layers) else 2
        worker.stage = planned.platform.stage(ways, num_tensors, described.hidden_size, plan)
    return replace(planned, spec=spec, plan=plan)


def _loaded(
    planned: Planned, files: ModelFiles, report: Report, draft: ModelFiles | None, peers: Peers | None = None,
    stage: StageIO | None = None,
) -> Model:  # fmt: skip
    """Load the model. If there is a draft model, load it with the same dtype and maximum length."""
    from runtime.models.adapters import AdapterRoom
    from runtime.models.decoder import Decoder
    from runtime.models.load import load_draft_head

    config, spec, plan = planned.config, planned.spec, planned.plan
    room = None
    if (lora := plan.lora) is not None:
        num_ready = min(lora.max_cpu_loras, lora.max_loras + _MORE_ADAPTERS_READY)
        room = AdapterRoom(lora.max_loras, lora.max_lora_rank, num_ready, lora.lora_experts, lora.lora_vocabulary)

    def loaded(
        spec: ModelSpec, files: ModelFiles, load_format: str, room: AdapterRoom | None = None, *, whole: bool = False
    ) -> Model:
        return load(
            spec,
            files,
            dtype=plan.dtype,
            load_format=load_format,
            seed=config.seed or 0,
            progress=report,
            max_model_len=plan.max_model_len,
            device=planned.platform.device,
            weights=plan.weights,
            adapters=room,
            peers=peers if peers is not None and peers.size > 1 and not whole else None,
            stage=None if whole else stage,
            counts_experts=config.enable_expert_distribution_metrics and not whole,
        )

    if not isinstance(spec, PairSpec):
        return loaded(spec, files, config.load_format, room)
    from runtime.models.pair import ModelPair

    model = loaded(spec.model, files, config.load_format, room)
    load_format = config.load_format if draft is None or config.load_format == "dummy" else "auto"
    if isinstance(spec.draft, DraftHeadSpec):
        assert isinstance(model, Decoder), "others have no draft heads"
        head = load_draft_head(
            spec.draft, draft or files, model, load_format=load_format, seed=config.seed or 0, progress=report,
            max_model_len=plan.max_model_len, weights=plan.weights,
        )  # fmt: skip
        return ModelPair(model, head)
    assert draft is not None
    return ModelPair(model, loaded(spec.draft, draft, load_format, whole=True))


def assemble(
    plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], runner: Runner, cache_key: bytes | None = None,
    shards: Sequence[Model] = (),
) -> EngineParts:  # fmt: skip
    """Create the scheduler and the description of a model, and return them with `runner`. `shards`: see `Running.assembled`."""
    limits = SchedulerLimits(
        plan.max_num_seqs, plan.max_num_batched_tokens, eos_token_ids, in_one_step=plan.layout.in_one_step
    )
    layout = plan.layout
    prefixes = PrefixCache(
        layout.kernel_block_size, plan.enable_prefix_caching, layout.groups, cache_key,
        entry_blocks=layout.block_size // layout.kernel_block_size,
    )  # fmt: skip
    adapters = _adapters(plan, model, shards or [model])
    scheduler = Scheduler(
        limits, BlockPool(plan.num_kv_blocks), prefixes, plan.policy(), step_budget=plan.step_budget(),
        features=features_of(plan, model, adapters),
    )  # fmt: skip
    return EngineParts(scheduler, runner, model_info(plan, model, eos_token_ids), plan, adapters)


def _adapters(plan: EnginePlan, model: Model, shards: Sequence[Model]) -> Adapters | None:
    if plan.lora is None or model.adapters is None:
        return None
    from runtime.lora.store import AdapterStore
    from runtime.lora.targets import targets_of

    spec = model.spec.model if isinstance(model.spec, PairSpec) else model.spec
    assert isinstance(spec, DecoderSpec), "others have no room for adapters"
    whole = spec if spec.shard_of is None else spec.shard_of.whole
    rooms = [shard.adapters for shard in shards if shard.adapters is not None]
    targets = targets_of(whole, experts=model.adapters.has_experts, vocabulary=model.adapters.has_vocabulary)
    return Adapters(plan.lora, AdapterStore(rooms, targets, plan.lora.max_lora_rank))


def model_info(plan: EnginePlan, model: Model, eos_token_ids: frozenset[int]) -> ModelInfo:
    return ModelInfo(
        architecture=model.spec.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=eos_token_ids,
        dtype=model.dtype,
        device=model.device,
        num_parameters=model.num_parameters,
        weights_bytes=model.weights_bytes,
        num_kv_blocks=plan.num_kv_blocks,
        kv_block_size=plan.layout.block_size,
        kv_cache_bytes=plan.kv_cache_bytes,
        kv_cache_note=plan.kv_cache_note,
        max_concurrency=plan.max_concurrency,
        prefix_caching=plan.enable_prefix_caching,
        max_num_seqs=plan.max_num_seqs,
        pooler=model.spec.pooler_info,
        generates=model.spec.generates,
        speculative="" if plan.speculative is None else str(plan.speculative),
        reads_predictions=plan.speculative is not None and plan.speculative.reads_predictions,
        modalities=frozenset() if model.encoder is None else model.encoder.spec.modalities,
        takes_embeds=takes_embeds(plan, model),
        speech=None if model.encoder is None else model.encoder.spec.speech,
    )


def timed(report: Report) -> Report:
    """Return a function that calls `report` and logs the duration of each phase when the next one begins."""
    began_s, running = time.monotonic(), ""

    def timed(progress: LoadProgress) -> None:
        nonlocal began_s, running
        if progress.phase != running:
            now = time.monotonic()
            if running:
                log.info("%s: %.1f s", running, now - began_s)
            began_s, running = now, progress.phase
        report(progress)

    return timed
