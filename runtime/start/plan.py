"""Planning: selects the model class, the device and the values of options from the model's files. Loads no weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.api import LoadProgress, ModelOutline
from runtime.config import EngineConfig, EnginePlan, PlanError
from runtime.models.implementation import describe
from runtime.models.read.eagle import head_from_config
from runtime.models.registry import add_plugins, mtp_from_config
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.draft_head import PairSpec
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.placement import read_placement
from runtime.models.spec.sharding import Placement, kept_whole, sharded
from runtime.models.spec.stages import stages
from runtime.platform.platform import Platform, Report, choose_platform
from runtime.runner.worker import Worker
from runtime.speculate.config import HEADS
from runtime.weights.fetch import ModelFiles
from runtime.weights.sentence_transformers import max_seq_length

if TYPE_CHECKING:
    from runtime.models.spec.model import ModelSpec

log = logging.getLogger("oneloop.start")


class SharedDevice:
    """Platform and worker thread that several engines of a process share.

    The platform plans each engine's memory after subtracting what earlier engines have allocated. `first`: number of the
    device, or of the first device of a model on several devices."""

    def __init__(self, first: int = 0, beside: SharedDevice | None = None) -> None:
        """Create a device with number `first`. `beside`: another device whose platform object is used too."""
        self.first = first
        self._beside = beside
        self._worker: Worker | None = None
        self._platform: Platform | None = None
        self._replicas: dict[int, SharedDevice] = {}

    def worker(self) -> Worker:
        """Return the worker thread for one more engine; a new one if the last one has no users. Requires a running event loop."""
        if self._worker is None or not self._worker.num_users:
            self._worker = Worker()
        else:
            self._worker.share()
        return self._worker

    def platform(self, name: str) -> Platform:
        if self._beside is not None:
            return self._beside.platform(name)
        if self._platform is None:
            self._platform = choose_platform(name)
        return self._platform

    def of_replica(self, number: int, size: int) -> SharedDevice:
        """Return the device of replica `number`. Each replica runs on `size` devices."""
        if not number:
            return self
        return self._replicas.setdefault(number, SharedDevice(self.first + number * size, self))


@dataclass(frozen=True, slots=True)
class Planned:
    """Plan of a model before its weights are loaded."""

    config: EngineConfig  # including what the model's files add
    spec: ModelSpec  # of the largest part, if the model is split
    whole: ModelSpec
    platform: Platform
    plan: EnginePlan
    weights_bytes: int

    def kernels(self) -> list[str]:
        """Return a line for each operation: its default kernel, and why a faster one is not used."""
        import ops

        return ops.describe()


def outline_model(config: EngineConfig, files: ModelFiles) -> ModelOutline:
    """Describe a model from its configuration files alone. Raises UnsupportedModel."""
    add_plugins(config.model_plugins)
    spec = describe(files.config, config.model_impl, files.modules)
    return ModelOutline(
        architecture=spec.architecture,
        max_model_len=_with_length(config, spec, files).max_model_len or spec.max_model_len,
        pooler=spec.pooler_info,
        generates=spec.generates,
        modalities=frozenset() if spec.encoder is None else spec.encoder.modalities,
        speech=None if spec.encoder is None else spec.encoder.speech,
    )


def plan_engine(
    config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None = None,
    device: SharedDevice | None = None,
) -> Planned:  # fmt: skip
    """Plan a model on a device. Imports torch, but loads no weights.

    Raises PlanError if the options do not fit, or UnsupportedModel if the model cannot be served."""
    add_plugins(config.model_plugins)
    whole = _with_draft(config, describe(files.config, config.model_impl, files.modules), files, draft)
    _refuse(config, whole)
    spec = _largest_part(config, whole)
    config = _with_length(config, spec, files)
    report(LoadProgress("import"))
    device = device or SharedDevice()
    platform = device.platform(config.device)
    platform.force_kernels(config)
    platform.refuse(config)
    if device.first:  # a new thread uses the first device
        platform.use(device.first)
    stored_bytes = None
    if config.load_format != "dummy":
        stored_bytes = sum(each.stored_bytes for each in (files, draft) if each)
        if config.num_devices > 1:
            stored_bytes = stored_bytes * spec.weights_bytes("float32") // whole.weights_bytes("float32")
    weights_bytes = platform.weights_bytes(config, spec, stored_bytes)
    return Planned(config, spec, whole, platform, platform.plan(config, spec, stored_bytes), weights_bytes)


def _refuse(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise PlanError if options require other options that are missing, or do not fit the model."""
    if config.enable_expert_parallel and config.tensor_parallel_size == 1:
        raise PlanError("--enable-expert-parallel distributes experts over devices: add --tensor-parallel-size")
    if config.expert_placement is not None and not config.enable_expert_parallel:
        raise PlanError("--expert-placement requires --enable-expert-parallel")
    described = spec.model if isinstance(spec, PairSpec) else spec
    has_experts = isinstance(described, DecoderSpec) and any(True for _ in described.experts())
    if config.enable_expert_distribution_metrics and not has_experts:
        raise PlanError(
            f"{spec.architecture} has no experts that are counted: leave --enable-expert-distribution-metrics out"
        )
    if spec.encoder is not None and spec.encoder.num_outputs:
        draft = {"speculative-config with a draft model or head": isinstance(spec, PairSpec)}
        for option in (name for name, is_on in ({"enable-lora": config.enable_lora} | draft).items() if is_on):
            raise PlanError(f"--{option} is not supported for speech models: leave it out")
    if config.pipeline_parallel_size > 1:
        unserved = {"enable-lora": config.enable_lora, "enable-prompt-embeds": config.enable_prompt_embeds}
        for option in (name for name, is_on in unserved.items() if is_on):
            raise PlanError(f"--{option} is not supported with --pipeline-parallel-size: leave one of them out")


def _largest_part(config: EngineConfig, spec: ModelSpec) -> ModelSpec:
    """Return the part of the model from which every device's memory is planned: a shard of the largest pipeline stage."""
    if config.num_devices == 1:
        return spec
    part = max(parts_of(config, spec, 0), key=lambda part: part.weights_bytes("float32"))
    described = part.model if isinstance(part, PairSpec) else part
    assert isinstance(described, DecoderSpec), "others are not cut"
    for kind in sorted(kept_whole(described)):
        log.info("layers of the kind %s are replicated on every device", kind)
    return part


def parts_of(config: EngineConfig, spec: ModelSpec, number: int) -> tuple[DecoderSpec | PairSpec, ...]:
    """Return the shard of rank `number` in each pipeline stage. A draft model or head belongs to the last stage and is not split.

    Raises UnsupportedModel, or PlanError if the placement of experts is invalid."""
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    described, draft = (spec.model, spec.draft) if isinstance(spec, PairSpec) else (spec, None)
    if not isinstance(described, DecoderSpec):
        raise UnsupportedModel(
            f"{spec.architecture} cannot be cut for {config.num_devices} devices: it runs through transformers"
        )
    if draft is not None and config.stages_apart:
        raise UnsupportedModel(f"{spec.architecture} does not support several processes: it has a draft model or head")
    whole = described.whole
    if num_stages > 1 and not whole.generates:
        raise UnsupportedModel(f"{spec.architecture} is a pooling model, which does not support pipeline stages")
    placement = None
    if config.enable_expert_parallel:
        if not any(True for _ in whole.experts()):
            raise PlanError(f"{spec.architecture} has no experts: leave --enable-expert-parallel out")
        placement = _placement(config, len(whole.layers))
    *first, last = stages(sharded(whole, number, size, placement), num_stages, draft)
    return (*first, last if draft is None else PairSpec(last, draft))


def _placement(config: EngineConfig, num_layers: int) -> Placement:
    if config.expert_placement is None:
        return Placement()
    try:
        return read_placement(Path(config.expert_placement), num_layers, config.tensor_parallel_size)
    except (OSError, ValueError) as error:
        raise PlanError(f"expert-placement {config.expert_placement}: {error}") from error


def _with_draft(config: EngineConfig, spec: ModelSpec, files: ModelFiles, draft: ModelFiles | None) -> ModelSpec:
    named = config.speculation is not None and config.speculation.model is not None
    if named != (draft is not None):
        raise PlanError("the speculative config must name a draft model with files")
    method = "" if config.speculation is None else config.speculation.method
    if method in HEADS:
        described = _described(spec, method)
        read = mtp_from_config if method == "mtp" else partial(head_from_config, method)
        return PairSpec.with_head(described, read((draft or files).config, described))
    if draft is None:
        return spec
    pair = PairSpec.of(spec, describe(draft.config, config.model_impl))
    if pair.max_model_len < min(spec.max_model_len, config.max_model_len or spec.max_model_len):
        if config.max_model_len is not None:
            raise PlanError(
                f"--max-model-len {config.max_model_len} is more than the draft model's {pair.max_model_len}: lower it, or take "
                "another draft model"
            )
        log.info(
            "max-model-len is %d, the draft model's, and not the model's %d", pair.max_model_len, spec.max_model_len
        )
    return pair


def _described(spec: ModelSpec, method: str) -> DecoderSpec:
    """Return `spec` if a draft head can read its hidden states; otherwise raise UnsupportedModel."""
    if not isinstance(spec, DecoderSpec):
        raise UnsupportedModel(f"{spec.architecture} runs through transformers, which does not support method {method}")
    return spec


def _with_length(config: EngineConfig, spec: ModelSpec, files: ModelFiles) -> EngineConfig:
    """Return `config` with the maximum length from sentence-transformers files, unless `config` sets another limit."""
    if files.modules is not None:
        length = files.modules.max_seq_length
    else:
        length = None if spec.generates or files.gguf is not None else max_seq_length(files.path)
    if config.max_model_len is not None or length is None or length >= spec.max_model_len:
        return config
    return replace(config, max_model_len=length)
