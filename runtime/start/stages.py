"""Creation of a model whose pipeline stages run in separate processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from runtime.config import EngineConfig, PlanError
from runtime.fault import WorkerGone
from runtime.models.spec.model import UnsupportedModel
from runtime.parallel.group import Apart
from runtime.parallel.links import LinkPort
from runtime.parallel.messages import Built
from runtime.parallel.processes import RunnersOverProcesses, StageFailed, StageProcesses
from runtime.parallel.stages import TakesTurns
from runtime.platform.platform import Report
from runtime.start.build import EngineParts, Running, model_info
from runtime.start.plan import SharedDevice
from runtime.start.ranks import OwnRanks
from runtime.weights.fetch import ModelFiles
from runtime.weights.rules import WeightsError

_SAID_BY_STAGES = {each.__name__: each for each in (PlanError, WeightsError, UnsupportedModel)}


async def build_over_processes(
    config: EngineConfig, files: ModelFiles, report: Report, device: SharedDevice, processes: StageProcesses
) -> EngineParts:
    """Build the first stage in this process, which also schedules, and the other stages in `processes`.

    Raises PlanError if a process has ended, and the errors of `start_engine`."""
    num_stages = config.pipeline_parallel_size
    port = LinkPort(processes.host, processes.secret)
    own: OwnRanks | None = None
    theirs: asyncio.Task[list[Built]] | None = None
    try:
        await processes.begin(num_stages)
        theirs = asyncio.create_task(processes.build(config, port.address))
        theirs.add_done_callback(lambda task: port.close() if task.cancelled() or task.exception() else None)
        try:
            own, (ranks,) = await build_stage(config, files, report, device, 0, port, processes.addresses(port.address))
        except (Apart, OSError):
            await theirs  # raises the cause, if a process has reported one
            raise
        built = await theirs
        (runner,) = own.runners([ranks])
    except BaseException as error:
        port.close()
        if theirs is not None:
            theirs.cancel()
        if own is not None:
            await own.close()
        await processes.close()
        if isinstance(error, StageFailed | WorkerGone | OSError):
            raise _of_stages(error) from error
        raise

    def end() -> None:
        own.end()
        port.close()

    far, plan, first = processes.runners(runner), built[-1].plan, ranks[0]
    stages: list[Sequence[TakesTurns]] = [own.stages[0], *([each] for each in far)]
    runner = RunnersOverProcesses(processes, [runner, *far], stages, plan.steps_in_flight, end)
    parts = Running(plan, first.model, first.eos_token_ids, runner).assembled(config.cache_key)
    facts = replace(
        built[-1].model,
        weights_bytes=sum(each.model.weights_bytes for each in ranks) + sum(each.weights_bytes for each in built),
        kv_cache_bytes=first.plan.kv_cache_bytes * len(ranks) + sum(each.kv_cache_bytes for each in built),
    )
    return replace(parts, model=facts)


def _of_stages(error: BaseException) -> Exception:
    """Return the start-up error that corresponds to an error reported by another stage's process."""
    if isinstance(error, StageFailed) and error.kind in _SAID_BY_STAGES:
        return _SAID_BY_STAGES[error.kind](str(error))
    where = ", ".join(getattr(error, "__notes__", ()))
    return PlanError(f"the stages of the model could not be started: {error}" + (where and f" ({where})"))


async def build_stage(
    config: EngineConfig, files: ModelFiles, report: Report, device: SharedDevice, stage: int, port: LinkPort,
    addresses: Sequence[tuple[str, int]],
) -> tuple[OwnRanks, list[list[Running]]]:  # fmt: skip
    """Build stage number `stage` in this process and connect it to the others. `addresses`: where all stages listen.

    Raises the errors of `start_engine`, Apart if another stage has failed, and OSError."""
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    links = await asyncio.to_thread(port.connected, stage, num_stages, size, addresses)
    own = OwnRanks(config, device.first, [stage], links)
    try:
        return own, await own.build(config, files, report, None, device)
    except BaseException:
        port.close()
        await own.close()
        raise


def built_stage(ranks: Sequence[Running]) -> Built:
    """Return the message about a stage that has been built, for the process of the first stage."""
    plan, model, eos_token_ids, _ = ranks[0]
    return Built(
        plan,
        model_info(plan, model, eos_token_ids),
        sum(each.model.weights_bytes for each in ranks),
        plan.kv_cache_bytes * len(ranks),
    )
