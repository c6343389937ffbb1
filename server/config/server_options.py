"""Options of the server: one field is one option, with its help, choices and bounds.

Options of the engine are inherited from `runtime.engine_options.EngineOptions`. Standard library only: `--help` imports this
module."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, Self

from runtime.engine_options import ENGINE, HTTP, MODEL, EngineOptions, option, seconds, size

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
ANY_NAME = "*"  # of --served-model-name
MEDIA, _LOG = "images, audio and video", "logging"
GROUPS = (MODEL, ENGINE, MEDIA, HTTP, _LOG)  # in the order of --help


class ConfigError(Exception):
    """Error: an option is invalid or not supported. The message names the option as the user wrote it."""


def flag_of(name: str) -> str:
    """Return the command-line flag of the option `name`: "--" and the name with hyphens."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(EngineOptions):
    """Options of a server as given by the user. None and "auto" are resolved by the code that uses the option."""

    models: tuple[str, ...] = option(
        ("smollm2-135m-instruct",),
        "short name, hub id, .gguf file or Hugging Face folder; repeatable: other models are loaded when requests name them",
        group=MODEL,
        metavar="MODEL",
        name="model",
    )
    max_loaded_models: int = option(
        1, "models loaded at the same time; the least recently used one is unloaded", group=MODEL, minimum=1
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "model names for clients, or one for each --model; responses use the first; * accepts any name (default: --model)",
        group=MODEL,
        metavar="NAME",
        several=True,
    )
    enable_model_management: bool = option(
        False,
        "let clients pull and delete models (/api/pull, /api/delete), and serve all models on this disk by name",
        group=MODEL,
    )
    tokenizer: str | None = option(
        None,
        "folder, .gguf file, hub id or short name (default: the model's tokenizer)",
        group=MODEL,
        metavar="MODEL",
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id", group=MODEL, metavar="REVISION")
    chat_template: str | None = option(
        None,
        "file with a Jinja chat template, or a reranker's by name (default: the model's)",
        group=MODEL,
        metavar="FILE",
    )
    tool_parser: str = option(
        "auto",
        "parser of tool calls, such as hermes, or none; auto goes by the chat template",
        group=MODEL,
        metavar="NAME",
        aliases=("--tool-call-parser",),
    )
    reasoning_parser: str = option(
        "auto",
        "parser of reasoning, such as qwen3, or none; auto goes by the chat template",
        group=MODEL,
        metavar="NAME",
    )
    allow_special_tokens: bool = option(
        False, "parse special tokens in clients' texts as control tokens, unless the request sets it", group=MODEL
    )
    embedding_model: str | None = option(
        None,
        "second model, for embeddings, scores or classes; --convert and --pooler-config apply to it",
        group=MODEL,
        metavar="MODEL",
    )
    speech_model: str | None = option(
        None, "another model, for /v1/audio/transcriptions, such as whisper-tiny.en", group=MODEL, metavar="MODEL"
    )
    runner: Literal["auto", "generate", "pooling"] = option(
        "auto", "task of the model: generate, or pooling for embeddings, scores and classes", group=MODEL
    )
    convert: Literal["auto", "none", "embed", "classify"] = option(
        "auto", "task of a pooling model; embed drops its classifier, classify requires one", group=MODEL
    )
    pooler_config: str | None = option(
        None,
        """pooling options, such as '{"pooling_type": "CLS"}' (default: by the model's files)""",
        group=MODEL,
        metavar="JSON",
    )
    generation_config: Literal["auto", "none"] = option(
        "auto", "sampling defaults: from the model's generation_config.json (auto), or OpenAI's (none)", group=MODEL
    )

    lora_modules: tuple[str, ...] = option(
        (),
        """LoRA adapters, as name=folder or '{"name": …, "path": …}'""",
        group=MODEL,
        metavar="NAME=PATH",
        several=True,
    )
    default_mm_loras: str | None = option(
        None,
        """adapters for requests with media that name none: '{"audio": "name or folder"}'""",
        group=MODEL,
        metavar="JSON",
    )
    lora_dir: str | None = option(
        None, "folder from which /v1/load_lora_adapter may load adapters", group=MODEL, metavar="FOLDER"
    )
    lora_resolver: str | None = option(
        None, "folder of adapters; an adapter is loaded when a request names it", group=MODEL, metavar="FOLDER"
    )

    limit_mm_per_prompt: str | None = option(
        None,
        """maximum media of a prompt: '{"image": 4, "video": 0}' (default: 16 of each)""",
        group=MEDIA,
        metavar="JSON",
    )
    media_io_kwargs: str | None = option(
        None, """options for decoding media, such as '{"video": {"num_frames": 16}}'""", group=MEDIA, metavar="JSON"
    )
    mm_processor_kwargs: str | None = option(
        None, """arguments of the model's processor, such as '{"max_pixels": 1003520}'""", group=MEDIA, metavar="JSON"
    )
    enable_mm_embeds: bool = option(
        False, "accept image_embeds and audio_embeds; only if all clients are trusted", group=MEDIA
    )
    mm_processor_cache_gb: float = option(
        1.0,
        "size of the cache of processed media, in GiB; 0 disables it",
        group=MEDIA,
        minimum=0,
        maximum=1024,
        metavar="GIB",
    )
    max_media_memory_gb: float = option(
        16.0,
        "maximum processed media of all requests, in GiB; further requests get 429",
        group=HTTP,
        minimum=0,
        maximum=16384,
        metavar="GIB",
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "hosts of media URLs: names, *.example.com, networks, or * for all public hosts (default: none)",
        group=MEDIA,
        metavar="HOST",
        several=True,
    )
    allowed_local_media_path: str | None = option(
        None, "folder below which requests may name files (file:///…)", group=MEDIA, metavar="FOLDER"
    )
    media_fetch_timeout: float = seconds(5.0, "seconds to fetch media from a URL", group=MEDIA, minimum=0.1)
    max_media_size: int = size(
        64 * 1024**2, "maximum size of a media file, such as 64MiB; larger ones are refused", group=MEDIA, minimum=1024
    )
    max_image_pixels: int = option(
        64_000_000,
        "maximum pixels of an image or video frame; larger ones are refused",
        group=MEDIA,
        minimum=1,
        maximum=2**31,
    )
    max_media_seconds: float = seconds(
        600.0, "maximum seconds of an audio or video file; longer ones are refused", group=MEDIA, minimum=0.1
    )

    max_audio_size: int = size(
        25 * 1024**2,
        "maximum size of a file to transcribe, such as 25MiB; larger ones are refused",
        group=MEDIA,
        minimum=1024,
    )
    max_audio_seconds: float = seconds(
        4 * 3600.0, "maximum seconds of a file to transcribe; longer ones are refused", group=MEDIA, minimum=0.1
    )

    host: str = option(DEFAULT_HOST, "address to listen on", group=HTTP, metavar="ADDRESS")
    port: int | None = option(
        None,
        f"port to listen on; 0 selects a free one (default: {DEFAULT_PORT})",
        group=HTTP,
        minimum=0,
        maximum=65535,
        metavar="PORT",
    )
    uds: str | None = option(
        None,
        "Unix socket to listen on instead of host and port; only the server's user and group may connect",
        group=HTTP,
        metavar="PATH",
    )
    ssl_certfile: str | None = option(
        None, "TLS certificate with its chain (PEM); the server then speaks HTTPS only", group=HTTP, metavar="FILE"
    )
    ssl_keyfile: str | None = option(None, "private key (PEM), if not in --ssl-certfile", group=HTTP, metavar="FILE")
    ssl_ca_certs: str | None = option(
        None, "CA certificates (PEM) to check client certificates", group=HTTP, metavar="FILE"
    )
    ssl_cert_reqs: int = option(
        0, "client certificates: 0 ignored, 1 checked if present, 2 required", group=HTTP, minimum=0, maximum=2
    )
    max_body_size: int = size(16 * 1024**2, "maximum size of a request body, such as 16MiB", minimum=1024)
    strict_fields: bool = option(
        False, "refuse requests with unknown fields, instead of listing them in X-Ignored-Fields", group=HTTP
    )
    max_stored_responses: int = option(
        1000, "responses of /v1/responses kept in memory; 0 keeps none", group=HTTP, minimum=0
    )
    max_stored_bytes: int = size(
        256 * 1024**2, "memory for stored responses, such as 256MiB; the oldest are removed", minimum=0
    )
    max_connections: int = option(16384, "maximum connections", group=HTTP, minimum=1)
    max_connections_per_address: int | None = option(
        None, "maximum connections of an address (default: half of --max-connections)", group=HTTP, minimum=1
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "accepted Host header: a name, *.example.com or *; repeatable (default: any; on loopback localhost and addresses)",
        group=HTTP,
        metavar="NAME",
    )
    timeout_head: float = seconds(30.0, "seconds for a request's line and headers; 0 is no limit")
    timeout_body: float = seconds(30.0, "seconds for every 16 KiB of a request's body; 0 is no limit")
    timeout_keep_alive: float = seconds(60.0, "seconds that a connection may be idle; 0 is no limit")
    timeout_write: float = seconds(300.0, "seconds without progress until a slow reader is cut off; 0 is no limit")
    batch_dir: str | None = option(
        None, "folder for /v1/files and /v1/batches (default: both are off)", group=HTTP, metavar="FOLDER"
    )
    max_batch_file_size: int = size(200 * 1024**2, "maximum size of an uploaded file, such as 200MiB")
    max_batch_files: int = option(10_000, "maximum files kept, including answers of batches", group=HTTP, minimum=1)
    max_batch_bytes: int = size(10 * 1024**3, "maximum disk space of all batch files, such as 10GiB")
    max_batch_requests: int = option(
        0, "maximum batch requests in flight; 0 is a quarter of --max-num-seqs", group=HTTP, minimum=0
    )
    ping_interval: float = seconds(
        15.0, "seconds of silence until a stream gets a ping; 0 disables pings", maximum=3600
    )
    request_timeout: float | None = seconds(
        None,
        "seconds until an unfinished answer ends with 504, unless the request sets it (default: never)",
        minimum=0.001,
    )
    drain_timeout: float = seconds(30.0, "seconds for running requests to finish after the first Ctrl-C")

    api_key: tuple[str, ...] = option(
        (),
        "key that clients must send; repeatable; ps shows flags, so prefer the environment variable",
        group=HTTP,
        metavar="KEY",
        secret=True,
    )
    api_key_file: str | None = option(None, "file with more keys, one per line", group=HTTP, metavar="FILE")
    admin_api_key: str | None = option(
        None,
        "administrator's key: opens everything, and alone opens /metrics and the dashboard; prefer the environment variable",
        group=HTTP,
        metavar="KEY",
        secret=True,
    )
    shared_prefix_cache: bool = option(
        False, "share the prefix cache between API keys; lets a client probe other clients' prompts", group=HTTP
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "origin whose pages may use this server, such as https://example.com, or *; repeatable",
        group=HTTP,
        metavar="ORIGIN",
    )
    cors_credentials: bool = option(False, "let pages of --cors-origin send cookies and HTTP logins", group=HTTP)

    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "minimum severity of log messages", group=_LOG
    )
    log_format: Literal["text", "json"] = option("text", "format of log lines", group=_LOG)
    log_requests: bool = option(
        False, "log parameters of requests, and keep the last prompts and answers for the inspector", group=_LOG
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "OTLP collector for traces, such as http://localhost:4318 (needs oneloop[otel])",
        group=_LOG,
        metavar="URL",
    )
    access_log: bool = option(True, "log every HTTP request", group=_LOG)
    profile_dir: str | None = option(
        None, "folder for traces of /start_profile (default: a temporary one)", group=HTTP, metavar="FOLDER"
    )
    dry_run: bool = option(False, "print the plan for this model and machine, and exit; loads no weights", group=HTTP)
    config: str | None = option(None, "YAML file with any of these options", group=_LOG, metavar="FILE")

    def __post_init__(self) -> None:
        """Do nothing: `ServerConfig` checks for contradictions."""

    @property
    def listen_port(self) -> int:
        return DEFAULT_PORT if self.port is None else self.port

    @property
    def model(self) -> str:
        """First model, which is loaded at the start."""
        return self.models[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the first model for clients. Responses use the first of them."""
        if len(self.models) > 1:
            return self.names_by_model[:1]
        return tuple(dict.fromkeys(self._own_names)) or (self.model,)

    @property
    def _own_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.served_model_name if name != ANY_NAME)

    @property
    def names_by_model(self) -> tuple[str, ...]:
        """Name of each model for clients, if there are several models."""
        return self._own_names or self.models

    @property
    def takes_any_name(self) -> bool:
        """Return whether the first model serves requests that name an unknown model."""
        return ANY_NAME in self.served_model_name

    def of_one_model(self, what: str) -> Self:
        """Return these options. Raises ConfigError if there are several models. `what`: name of the feature, for the error."""
        if len(self.models) > 1:
            raise ConfigError(f"{what} supports one model only: use one --model")
        return self

    def each_model(self) -> list[Self]:
        """Return the options of each model, with one model each."""
        if len(self.models) == 1:
            return [self]
        return [
            dataclasses.replace(
                self,
                models=(model,),
                served_model_name=(name,),
                max_loaded_models=1,
                embedding_model=None,
                speech_model=None,
            )
            for model, name in zip(self.models, self.names_by_model, strict=True)
        ]
