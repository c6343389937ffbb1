"""Plans: facts about a model before its weights are read, from its configuration and the options.

Only this module and `load` use the engine and a model's files."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from runtime.api import ModelInfo, ModelOutline
from server.config.server_config import ServerConfig
from server.models.lifecycle import LoadError, Report
from server.models.pooling import PoolerConfig, pooled_tasks, served_runner
from server.models.score_template import KNOWN_RERANKERS
from server.models.speech import Task
from server.models.swaps import Outline
from server.models.tokenizer import TokenizerError, template_of

if TYPE_CHECKING:
    from runtime.weights.fetch import ModelFiles

logger = logging.getLogger("oneloop.load")


def import_engine() -> None:
    """Import the engine. Called on a thread, so that later imports do not block the event loop."""
    from runtime.preload import preload_torch

    preload_torch()
    from runtime import start  # noqa: F401


def check_sizes(config: ServerConfig) -> None:
    """Check the requested sizes against the configuration of a local model, without importing torch. Models that are not on
    disk, or not implemented here, are checked later by `load`. Raises ValueError."""
    from runtime.config import DeviceDefaults, EngineConfig, EnginePlan
    from runtime.models.registry import spec_from_config
    from runtime.models.spec.model import UnsupportedModel
    from runtime.weights.fetch import resolve
    from runtime.weights.names import is_light, is_on_hub
    from runtime.weights.rules import WeightsError

    if is_on_hub(config.model) or not is_light(config.model):
        return
    try:
        spec = spec_from_config(resolve(config.model, config.revision, lambda progress: None).config)
    except (WeightsError, UnsupportedModel):
        return
    # The least that any device takes: what does not fit that fits none.
    least = DeviceDefaults("bfloat16", 1, 2, lambda free_bytes: free_bytes)
    EnginePlan.resolve(
        EngineConfig.of(config, end_token_ids=frozenset()),
        dtype=least.dtype if config.dtype == "auto" else config.dtype,
        layers=spec.memory_kinds(),
        model_len=spec.max_model_len,
        defaults=least,
        free_bytes=1 << 50,
    )


def outline(config: ServerConfig, cancel: Event) -> Outline | None:
    """Return a model's outline from its files. For a model on the hub, only the configuration is downloaded. None if the files
    do not suffice; loading then reports the reason."""
    from runtime.config import EngineConfig
    from runtime.models.spec.model import UnsupportedModel
    from runtime.start import outline_model
    from runtime.weights.fetch import resolve
    from runtime.weights.names import is_light
    from runtime.weights.rules import WeightsError

    if not is_light(config.model):
        return None
    try:
        files = resolve(config.model, config.revision, lambda progress: None, cancel=cancel, load_format="dummy")
        model = outline_model(EngineConfig.of(config, end_token_ids=frozenset()), files)
        runner = served_runner(config.runner, model, embeds=files.modules is not None)
        tasks: tuple[str, ...] = ("generate",) if model.speech is None else get_args(Task)
        if runner == "pooling":
            tasks = pooled_tasks(model, pooler_config(config, model), config.convert)
        chats = bool(template_of(files.tokenizer_path, None if files.gguf is None else files.gguf.metadata))
    except (WeightsError, UnsupportedModel, TokenizerError, ValueError) as error:
        logger.info("%s: its properties are unknown until it is loaded (%s)", config.served_names[0], error)
        return None
    return Outline(model.max_model_len, tuple(sorted(model.modalities)), tasks, chats)


def pooler_config(config: ServerConfig, model: ModelInfo | ModelOutline) -> PoolerConfig:
    """Return the value of --pooler-config. For a known reranker in --chat-template, its answer tokens are added. Raises
    ValueError."""
    chosen = PoolerConfig.read(config.pooler_config)
    known = KNOWN_RERANKERS.get(config.chat_template or "")
    if known is not None and model.generates and chosen.classifier_from_token is None:
        chosen = msgspec.structs.replace(chosen, classifier_from_token=list(known.answers))
    return chosen


def draft_files(config: ServerConfig, fetch: Callable[..., ModelFiles]) -> ModelFiles | None:
    """Fetch the files of the draft model; None if the options name no draft model. Raises WeightsError."""
    speculation = config.speculation
    if speculation is None or speculation.model is None:
        return None
    return fetch(speculation.model, None, load_format="dummy" if config.load_format == "dummy" else "auto")


def dry_run(config: ServerConfig, report: Report) -> dict[str, Any]:
    """Return the resolved options for this model on this machine, as JSON data, without loading weights. From the hub, only
    configuration and tokenizer are downloaded; a built-in model's file is downloaded whole. Raises LoadError."""
    from runtime.config import EngineConfig, PlanError
    from runtime.weights.fetch import resolve
    from runtime.weights.names import is_on_hub
    from runtime.weights.rules import WeightsError

    def fetch(model: str, revision: str | None, *, load_format: str) -> ModelFiles:
        return resolve(model, revision, report, load_format="dummy" if is_on_hub(model) else load_format)

    try:
        files = fetch(config.model, config.revision, load_format=config.load_format)
        draft = draft_files(config, fetch)
        if is_on_hub(config.model):
            config = dataclasses.replace(config, load_format="dummy")
        import_engine()
        from runtime.start import plan_engine

        planned = plan_engine(EngineConfig.of(config, end_token_ids=frozenset()), files, report, draft)
    except (WeightsError, PlanError) as error:
        raise LoadError(str(error)) from error
    plan = planned.plan
    return {
        "model": config.model,
        "served_model_names": config.served_names,
        "architecture": planned.spec.architecture,
        "device": planned.platform.device,
        "device_name": planned.platform.describe(),
        "dtype": plan.dtype,
        "weights_bytes": planned.weights_bytes,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "kv_cache_bytes": plan.kv_cache_bytes,
        "num_kv_blocks": plan.num_kv_blocks,
        "kv_block_size": plan.layout.block_size,
        "max_concurrency": round(plan.max_concurrency, 2),
        "data_parallel_size": config.data_parallel_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_prefix_caching": plan.enable_prefix_caching,
        "scheduling_policy": config.scheduling_policy,
        "speculative": None if plan.speculative is None else str(plan.speculative),
        "notes": list(plan.notes),
        "kernels": planned.kernels(),
    }
