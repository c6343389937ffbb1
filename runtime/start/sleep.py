"""Release of a model's memory when the engine falls asleep, and rebuilding of the model when it wakes."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

from runtime.api import SleepLevel
from runtime.config import EngineConfig
from runtime.platform.platform import choose_platform
from runtime.start.build import EngineParts, timed
from runtime.start.plan import SharedDevice
from runtime.start.ranks import build_parts
from runtime.step import Runner
from runtime.weights.fetch import ModelFiles
from runtime.weights.rules import WeightsError


class ModelRunnerFactory:
    """Factory that builds the runner again (see `sleeping.RunnerFactory`), with the same number of rows and blocks."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        draft: ModelFiles | None,
        parts: EngineParts,
        device: SharedDevice | None,
    ) -> None:
        self._device = device
        self._files = files
        self._draft = draft
        self._model, self._adapters, plan = parts.model, parts.adapters, parts.plan
        self._expert_load = parts.expert_load
        self._config = replace(
            config,
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            num_kv_blocks=plan.num_kv_blocks,
            kv_cache_bytes=None,
        )

    async def build(self) -> Runner:
        """Build the runner. Raises PlanError, WeightsError or UnsupportedModel if files have changed or memory is short."""
        device = self._device or SharedDevice()
        parts = await build_parts(self._config, self._files, timed(lambda progress: None), self._draft, device)
        if parts.model != self._model:
            await parts.runner.close()
            raise WeightsError(f"the files of {self._files.name} have changed since the model was loaded")
        if self._adapters is not None:
            assert parts.adapters is not None, "it is built as the first was"
            self._adapters.awake(parts.adapters)
        if self._expert_load is not None:
            assert parts.expert_load is not None, "it is built as the first was"
            self._expert_load.awake(parts.expert_load)
        return parts.runner

    async def release(self, level: SleepLevel) -> None:
        if self._adapters is not None:
            self._adapters.sleep()
        await asyncio.to_thread(self._release, level)

    def _release(self, level: SleepLevel) -> None:
        frozen = gc.get_freeze_count()
        if frozen:  # garbage collection skips the frozen objects of the loaded model, which must now be collected
            gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()
        choose_platform(self._config.device).release_memory()
        if level is SleepLevel.DROPPED:
            for files in filter(None, (self._files, self._draft)):
                files.leave_memory()
