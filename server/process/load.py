"""load: creates a LoadedModel from a ServerConfig: files, tokenizer, chat format, grammars, engine.

Only this module and `plan` use the engine and the model's files; the rest of the server uses `runtime.api` alone. The heavy
parts of `runtime` are imported on a thread, when the port is already open."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Literal

from runtime.api import AdapterRefused, EngineClient, LoadProgress, ModelInfo, SleepLevel
from server.config.server_config import ServerConfig
from server.generate.structured.compiler import Grammars
from server.media.media_options import MediaOptions
from server.models.adapters import AdapterModule, Resolver, by_modality
from server.models.chat_format import ChatFormat
from server.models.defaults import sampling_defaults
from server.models.lifecycle import LoadError, Report
from server.models.model import LoadedModel
from server.models.pooling import Prompts, ServedPooling, served_runner
from server.models.prompt import ChatTemplate, PromptError
from server.models.score_template import KNOWN_RERANKERS, ScoreTemplate
from server.models.speech import ServedSpeech, SpeechFormat
from server.models.swaps import Outline, SwappedModel, Swaps
from server.models.tokenizer import Tokenizer, TokenizerError
from server.process.plan import draft_files, import_engine, outline, pooler_config
from server.text import native

if TYPE_CHECKING:
    from runtime.parallel.messages import Join
    from runtime.parallel.processes import Launcher
    from runtime.start import SharedDevice
    from runtime.weights.fetch import ModelFiles

logger = logging.getLogger("oneloop.load")


# Options about this machine and its clients, which apply to every model.
_FOR_ALL_MODELS = (
    "device", "num_threads", "kernels", "attention_backend", "dtype", "enforce_eager", "gpu_memory_utilization", "model_impl",
    "model_plugins", "stream_interval", "scheduling_policy", "max_itl", "target_ttft", "seed", "max_queue",
    "max_queued_tokens", "max_num_seqs_per_key", "max_tokens_per_minute_per_key", "max_queue_time", "convert", "pooler_config",
    "sleep_after",
)  # fmt: skip


async def load(
    config: ServerConfig, report: Report, cancel: Event, *, stages: Callable[[], Launcher] | None = None
) -> LoadedModel:
    """Load the models for embeddings and speech, then the first model, which uses the remaining memory. `cancel`: ends a
    download when set. `stages`: launcher factory, if each pipeline stage has its own process. Raises LoadError."""
    native.warn_if_missing()
    device, besides = functools.cache(_shared_device), list[ModelSource]()
    if config.embedding_model is not None:
        pooled = embedding_config(config, config.embedding_model)
        besides.append(ModelSource(pooled, report, cancel, device, beside=True))
        config = dataclasses.replace(config, runner="generate", convert="auto", pooler_config=None)
    if config.speech_model is not None:
        hearing = speech_config(config, config.speech_model)
        besides.append(ModelSource(hearing, report, cancel, device, beside=True))
    first, *others = config.each_model()
    source = ModelSource(first, report, cancel, device, stages=stages)
    # Before torch is imported, which takes seconds: a wrong name, a missing file or a bad tokenizer is refused at once.
    await asyncio.to_thread(_check_names, others)
    for each in (*besides, source):
        await each.prepare()
    report(LoadProgress("import"))
    await asyncio.to_thread(import_engine)
    if not gc.isenabled():  # by a start, which leaves out of collections what it loads; it makes some itself on the way
        gc.freeze()
    beside: LoadedModel | None = None
    try:
        for each in besides:
            beside = dataclasses.replace(await each.load(), beside=beside)
        loaded = await source.load()
        if others or config.enable_model_management:
            loaded = _in_turns(config, source, loaded, others, cancel, device)
    except BaseException:
        if beside is not None:
            await beside.engines.close()
        raise
    return dataclasses.replace(loaded, beside=beside)


def _shared_device() -> SharedDevice:
    from runtime.start import SharedDevice

    return SharedDevice()


def _check_names(configs: Sequence[ServerConfig]) -> None:
    """Raise LoadError if a model name is invalid. Otherwise the first request for that model would fail."""
    from runtime.weights.names import check_name
    from runtime.weights.rules import WeightsError

    try:
        for each in configs:
            check_name(each.model)
    except WeightsError as error:
        raise LoadError(str(error)) from error


def _in_turns(
    config: ServerConfig, source: ModelSource, loaded: LoadedModel, others: Sequence[ServerConfig], cancel: Event,
    device: Callable[[], SharedDevice],
) -> LoadedModel:  # fmt: skip
    """Return `loaded` as one of several models that are loaded on demand. `source`: its loader. `others`: the other models'
    options."""
    sources = [source]
    sources += [ModelSource(other, _phases_logged(other.served_names[0]), cancel, device) for other in others]
    names = [config.served_names[0], *(other.served_names[0] for other in others)]
    swaps = Swaps[LoadedModel](
        list(zip(names, sources, strict=True)),
        max_loaded=config.max_loaded_models,
        level=SleepLevel.HOST,
        max_waiting=config.max_queue,
        max_wait_s=config.max_queue_time,
    )
    for model, each in zip(swaps.models, sources, strict=True):
        each.place = model

    def add(name: str) -> None:
        other = dataclasses.replace(
            config, models=(name,), served_model_name=(name,), max_loaded_models=1, embedding_model=None
        )
        added = ModelSource(other, _phases_logged(name), cancel, device)
        added.place = swaps.add(name, added)

    managed = config.enable_model_management
    if managed:
        for name in _kept_names():
            if name not in (*names, *config.models):
                add(name)
    loaded = dataclasses.replace(
        loaded.in_turns(swaps.models[0]), takes_any_name=config.takes_any_name, add=add if managed else None
    )
    swaps.begin_with(swaps.models[0], loaded)
    return loaded


def _kept_names() -> list[str]:
    """Return the names of the models on this disk."""
    from runtime.weights.library import kept

    return [model.name for model in kept() if model.is_whole]


def _phases_logged(name: str) -> Report:
    """Return a report that logs loading phases. Used for the model `name`, which is loaded while others serve requests."""
    last = ""

    def report(progress: LoadProgress) -> None:
        nonlocal last
        if progress.phase != last:
            last = progress.phase
            logger.info("%s: %s …", name, last)

    return report


def embedding_config(config: ServerConfig, model: str) -> ServerConfig:
    """Return the options of the pooling model `model`, which is loaded in addition to the first model."""
    kept = {name: getattr(config, name) for name in _FOR_ALL_MODELS}
    drawn: Literal["auto", "dummy"] = "dummy" if config.load_format == "dummy" else "auto"
    return ServerConfig(models=(model,), runner="pooling", load_format=drawn, **kept)


def speech_config(config: ServerConfig, model: str) -> ServerConfig:
    """Return the options of the speech model `model`, which is loaded in addition to the first model."""
    limits = ("max_audio_size", "max_audio_seconds", "max_media_memory_gb")
    pooled = embedding_config(config, model)
    kept = {name: getattr(config, name) for name in limits}
    return dataclasses.replace(pooled, runner="generate", convert="auto", pooler_config=None, **kept)


@dataclasses.dataclass(frozen=True, slots=True)
class HostParts:
    """Parts of a model that do not use device memory."""

    files: ModelFiles
    draft: ModelFiles | None
    tokenizer: Tokenizer
    template: ChatTemplate
    chat_format: ChatFormat


class ModelSource:
    """Loader of one model, a `swaps.ModelLoader`. `beside`: whether it loads a pooling or speech model in addition to the first
    model. `place`: state of the model among swapped models, if any. `stages`: as for `load`."""

    def __init__(
        self, config: ServerConfig, report: Report, cancel: Event, device: Callable[[], SharedDevice], *, beside: bool = False,
        stages: Callable[[], Launcher] | None = None,
    ) -> None:  # fmt: skip
        self._stages = stages
        self.place: SwappedModel[LoadedModel] | None = None
        self._config = config
        self._report = report
        self._cancel = cancel
        self._device = device
        self._beside = beside
        self._prepared: HostParts | None = None

    async def prepare(self) -> None:
        self._prepared = await _prepare(self._config, self._report, self._cancel)

    async def outline(self) -> Outline | None:
        return await asyncio.to_thread(outline, self._config, self._cancel)

    async def load(self) -> LoadedModel:
        assert self._prepared is not None, "it was prepared"
        loaded = await _load_one(
            self._config, self._report, self._prepared, self._device(), beside=self._beside, stages=self._stages
        )
        self._prepared = None
        return loaded.in_turns(self.place)


async def _prepare(config: ServerConfig, report: Report, cancel: Event) -> HostParts:
    """Load the parts of a model that need no device memory: files, tokenizer and templates. Raises LoadError."""
    from runtime.weights.fetch import resolve
    from runtime.weights.rules import WeightsError

    fetch = partial(resolve, progress=report, cancel=cancel)
    try:
        MediaOptions(config)  # report errors before loading
    except ValueError as error:
        raise LoadError(str(error)) from error
    try:
        report(LoadProgress("files"))
        files = await asyncio.to_thread(fetch, config.model, config.revision, load_format=config.load_format)
        draft = await asyncio.to_thread(draft_files, config, fetch)
        # The tokenizer first: it takes a fraction of a second, and an engine is not easily called back.
        return HostParts(files, draft, *await asyncio.to_thread(load_text, config, files, fetch, report))
    except (WeightsError, TokenizerError, PromptError) as error:
        raise LoadError(str(error)) from error


async def _load_one(
    config: ServerConfig, report: Report, prepared: HostParts, device: SharedDevice, *, beside: bool,
    stages: Callable[[], Launcher] | None,
) -> LoadedModel:  # fmt: skip
    """Load one model with its engine from `prepared`. `beside`: it is loaded in addition to the first model. Raises LoadError."""
    from runtime.config import EngineConfig, PlanError
    from runtime.parallel.messages import ModelName
    from runtime.parallel.processes import StageProcesses
    from runtime.start import start_replicas
    from runtime.weights.rules import WeightsError

    files, tokenizer, chat_format = prepared.files, prepared.tokenizer, prepared.chat_format
    try:
        ends = files.eos_token_ids | tokenizer.eos_token_ids | chat_format.stop_ids
        grammars = Grammars(tokenizer, ends)
        imported = asyncio.Event()
        warming = asyncio.create_task(_warm(grammars, imported))
        # A GGUF file names one end token; what its vocabulary marks as the end of a turn ends an answer too.
        # So does what begins somebody else's turn.
        end_token_ids = tokenizer.eos_token_ids | chat_format.stop_ids
        pools = config.runner == "pooling" or (config.runner == "auto" and files.modules is not None)
        options = EngineConfig.of(config, end_token_ids=end_token_ids, beside=beside, pools=pools)
        try:
            processes = None
            if stages is not None:
                processes = StageProcesses(stages(), ModelName(config.model, config.revision))
            engine = await start_replicas(
                options, files, _noting_weights(report, imported), prepared.draft, device, processes
            )
            imported.set()
            report(LoadProgress("grammars"))
            await warming
        finally:
            warming.cancel()
    except (WeightsError, TokenizerError, PromptError, PlanError) as error:
        raise LoadError(str(error)) from error
    if tokenizer.vocab_size > engine.model.vocab_size:
        await engine.close()
        raise LoadError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {engine.model.vocab_size}: "
            "they do not match"
        )
    try:
        pooling = served_pooling(config, files, engine.model, tokenizer, prepared.template)
    except ValueError as error:
        await engine.close()
        raise LoadError(str(error)) from error
    reader = MediaOptions(config).reader
    try:
        speech = await asyncio.to_thread(served_speech, config, files, engine.model, tokenizer)
        modalities = engine.model.modalities if speech is None else frozenset[str]()
        media = await asyncio.to_thread(reader, files.tokenizer_path, files.config, modalities)
        mm_adapters = await _load_adapters(config, engine)
    except (ValueError, AdapterRefused) as error:
        await engine.close()
        raise LoadError(str(error)) from error
    resolver = None
    if config.lora_resolver is not None and engine.adapters is not None:
        resolver = Resolver(Path(config.lora_resolver), engine.adapters)
    generation_config = files.generation_config if config.generation_config == "auto" else {}
    defaults = sampling_defaults(generation_config)
    return LoadedModel(
        engine, tokenizer, prepared.template, defaults, config.served_names, chat_format,
        grammars=grammars, allow_special_tokens=config.allow_special_tokens, pooling=pooling,
        gguf_quantization=None if files.gguf is None else files.gguf.quantization,
        resolver=resolver, media=media, mm_adapters=mm_adapters, takes_any_name=config.takes_any_name, speech=speech,
    )  # fmt: skip


async def _load_adapters(config: ServerConfig, engine: EngineClient) -> dict[str, str]:
    """Load the adapters of --lora-modules and --default-mm-loras. Return default adapters by modality. Raises ValueError or
    AdapterRefused."""
    if engine.adapters is None:
        return {}
    for module in AdapterModule.all_of(config.lora_modules):
        if module.name in config.served_names:
            raise ValueError(f"--lora-modules {module.name}={module.path}: this is a name of the model; choose another")
        await engine.adapters.load(module.name, module.path)
    wanted = by_modality(config.default_mm_loras)
    if unknown := sorted(wanted.keys() - engine.model.modalities):
        raise ValueError(f"--default-mm-loras: {engine.model.architecture} does not accept {unknown[0]}")
    names = {
        modality: each if engine.adapters.find(each) is not None else modality for modality, each in wanted.items()
    }
    for modality, name in names.items():
        if name != wanted[modality]:  # a folder, whose adapter is called as its modality
            await engine.adapters.load(name, wanted[modality])
    return names


async def _warm(grammars: Grammars, imported: asyncio.Event) -> None:
    """Warm up grammars after `imported` is set, since warm-up and import both hold the GIL for some tenths of a second."""
    await imported.wait()
    await asyncio.to_thread(grammars.warm)


def _noting_weights(report: Report, imported: asyncio.Event) -> Report:
    """Return `report` with a hook that sets `imported` when the weights are read. Callable from any thread."""
    loop = asyncio.get_running_loop()

    def noting(progress: LoadProgress) -> None:
        report(progress)
        if progress.phase == "weights":
            loop.call_soon_threadsafe(imported.set)

    return noting


def served_speech(
    config: ServerConfig, files: ModelFiles, model: ModelInfo, tokenizer: Tokenizer
) -> ServedSpeech | None:
    """Return the transcription settings of a speech model; None for other models. Raises SpeechFormatError."""
    if model.speech is None:
        return None
    folder = files.tokenizer_path
    format = SpeechFormat.read(model.speech, tokenizer, files.config, files.generation_config, folder)
    logger.info("transcribes audio: %s", ", ".join(sorted(format.languages)) or "English")
    return ServedSpeech(format, int(config.max_media_memory_gb * 1024**3))


def served_pooling(
    config: ServerConfig, files: ModelFiles, model: ModelInfo, tokenizer: Tokenizer, template: ChatTemplate
) -> ServedPooling | None:
    """Return the pooling settings, or None for a model that generates. Raises ValueError for options that it does not support."""
    if served_runner(config.runner, model, embeds=files.modules is not None) == "generate":
        if config.convert in ("embed", "classify") or config.pooler_config is not None:
            raise ValueError("--convert and --pooler-config require a pooling model: add --runner pooling")
        return None
    folder = files.tokenizer_path
    prompts = Prompts() if files.gguf is not None else Prompts.read(files.modules_path or folder, folder)
    chosen = pooler_config(config, model)
    if config.chat_template is not None:
        score_template = ScoreTemplate.of_option(template)
    else:
        score_template = ScoreTemplate.of_files(template, prompts.template_kwargs)
    served = ServedPooling.of(model, tokenizer, chosen, config.convert, prompts, score_template)
    logger.info(
        "tasks: %s%s", ", ".join(served.tasks),
        "" if score_template is None else "; queries and documents are compared in the model's score prompt",
    )  # fmt: skip
    return served


async def compute_stage(join: Join) -> None:
    """Compute one pipeline stage of a model whose first stage is in another process; see `runtime.start.stage_process`."""
    await asyncio.to_thread(import_engine)
    from runtime.start import stage_process

    await stage_process.compute_stage(join)


def load_text(
    config: ServerConfig, files: ModelFiles, fetch: partial[ModelFiles], report: Report
) -> tuple[Tokenizer, ChatTemplate, ChatFormat]:
    """Load the tokenizer (of --tokenizer or the model), the chat template (of --chat-template or the tokenizer) and the chat
    format. Raises WeightsError, TokenizerError, PromptError, or LoadError for an unknown parser."""
    chosen = config.tokenizer
    if chosen is not None and Path(chosen).is_dir():
        tokenizer = Tokenizer.from_folder(chosen)
    else:
        source = files if chosen is None else fetch(chosen, None, load_format="dummy")
        report(LoadProgress("tokenizer"))
        gguf = source.gguf
        tokenizer = Tokenizer.from_folder(source.tokenizer_path) if gguf is None else Tokenizer.from_gguf(gguf.metadata)
    template = tokenizer.chat_template
    if config.chat_template in KNOWN_RERANKERS:
        template = KNOWN_RERANKERS[config.chat_template].template
    elif config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(
                f"--chat-template {config.chat_template} cannot be read: {error}; built-in templates: {', '.join(KNOWN_RERANKERS)}"
            ) from error
    compiled = ChatTemplate(template, tokenizer.named_tokens)
    try:
        chat_format = ChatFormat.choose(
            template, compiled, tokenizer, tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser
        )
    except ValueError as error:
        raise LoadError(str(error)) from error
    if compiled:
        logger.info("chats: %s", chat_format)
    return tokenizer, compiled, chat_format
