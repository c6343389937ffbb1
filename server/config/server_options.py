"""ServerOptions: what a user can ask of the server; those of the engine are
`runtime.engine_options.EngineOptions`, written there alone.

One field is one option, with its help, its choices and its bounds. Knows nothing of models or engines: what an option means is
their business. Standard library only: `--help` reads it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from runtime.engine_options import ENGINE, HTTP, MODEL, EngineOptions, option, parse_size

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
MEDIA, _LOG = "images, audio and video", "logging"
GROUPS = (MODEL, ENGINE, MEDIA, HTTP, _LOG)  # in the order of --help


class ConfigError(Exception):
    """An option that cannot be honoured. The message names it as the user wrote it."""


def seconds(default: float | None, text: str, *, group: str = HTTP, minimum: float = 0) -> Any:
    """An option of the server that is a time."""
    return option(default, text, group=group, minimum=minimum, maximum=86400, metavar="SECONDS")


def flag_of(name: str) -> str:
    """How an option is called on a command line. `name`: the user's word for it."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(EngineOptions):
    """As asked: None and "auto" are resolved by whoever owns the matter."""

    models: tuple[str, ...] = option(
        ("smollm2-135m-instruct",),
        "folder in Hugging Face format, .gguf file, hub id, or built-in alias; given several times, the first is loaded, and the "
        "others when requests name them",
        group=MODEL,
        metavar="MODEL",
        name="model",
    )
    max_loaded_models: int = option(
        1,
        "of several --model, so many are loaded at a time; the one that was used least lately makes room",
        group=MODEL,
        minimum=1,
    )
    unloaded_weights: Literal["host", "dropped"] = option(
        "host",
        "what becomes of the weights of the one that makes room: host leaves their files in the system's memory, as far as it has "
        "room, dropped does not",
        group=MODEL,
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names that clients may use, the first of which is in answers (default: --model); with several --model, one name for each "
        "in their order",
        group=MODEL,
        metavar="NAME",
        several=True,
    )
    tokenizer: str | None = option(
        None, "folder, .gguf file, hub id or alias to take the tokenizer from", group=MODEL, metavar="MODEL"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id", group=MODEL, metavar="REVISION")
    chat_template: str | None = option(
        None,
        "file with a Jinja chat template to use instead of the model's; of a reranker, the prompt of messages of the roles query "
        "and document, for which there are names, too: qwen3-reranker, bge-reranker-v2-gemma, mxbai-rerank-v2",
        group=MODEL,
        metavar="FILE",
    )
    tool_parser: str = option(
        "auto",
        "how the model writes tool calls: a parser such as hermes, none, or auto to find it by the chat template",
        group=MODEL,
        metavar="NAME",
        aliases=("--tool-call-parser",),
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning: a parser such as qwen3, none, or auto to find it by the chat template",
        group=MODEL,
        metavar="NAME",
    )
    allow_special_tokens: bool = option(
        False,
        "special tokens in what clients write into chats are control tokens; else they are text, unless a request says "
        "allow_special_tokens",
        group=MODEL,
    )
    embedding_model: str | None = option(
        None,
        "serve this model too, to be pooled, beside --model, which generates: as --model takes it; --convert and --pooler-config "
        "are about this one then",
        group=MODEL,
        metavar="MODEL",
    )
    runner: Literal["auto", "generate", "pooling"] = option(
        "auto",
        "what the model is served for: auto is to be pooled (embeddings, scores, classes) if it cannot generate or its files are "
        "sentence-transformers', else to generate",
        group=MODEL,
    )
    convert: Literal["auto", "none", "embed", "classify"] = option(
        "auto",
        "what a pooled model is for: embed leaves its classifier out, classify refuses one that has none",
        group=MODEL,
    )
    pooler_config: str | None = option(
        None,
        """how it is pooled, where its files are not to say, as vLLM has it: '{"pooling_type": "CLS", "use_activation": false}'""",
        group=MODEL,
        metavar="JSON",
    )
    generation_config: Literal["auto", "none"] = option(
        "auto", "sampling defaults: auto takes the model's generation_config, none OpenAI's", group=MODEL
    )

    lora_modules: tuple[str, ...] = option(
        (),
        """LoRA adapters to serve beside the model, each under a name of its own: name=folder, or '{"name": …, "path": …}'""",
        group=MODEL,
        metavar="NAME=PATH",
        several=True,
    )
    default_mm_loras: str | None = option(
        None,
        """adapters for requests with pictures, sounds or videos that name none: '{"audio": "name or folder"}'""",
        group=MODEL,
        metavar="JSON",
    )
    lora_dir: str | None = option(
        None,
        "folder from below which POST /v1/load_lora_adapter may load adapters; from nowhere else",
        group=MODEL,
        metavar="FOLDER",
    )
    lora_resolver: str | None = option(
        None,
        "folder of adapters: a request for a model of that name loads the one in the folder so called",
        group=MODEL,
        metavar="FOLDER",
    )

    structured_outputs_whitespace: Literal["compact", "none", "any"] = option(
        "compact",
        "white space in JSON of a given form: compact is a space at most behind a comma or a colon, any leaves room to indent",
        group=MODEL,
    )
    structured_outputs_closed: bool = option(
        True, "keep JSON objects to the properties that their schema lists, unless it says that there may be others",
        group=MODEL,
    )  # fmt: skip

    limit_mm_per_prompt: str | None = option(
        None,
        """pictures, sounds and videos that a prompt may have, at most: '{"image": 4, "video": 0}'; 16 of each that is not named""",
        group=MEDIA,
        metavar="JSON",
    )
    media_io_kwargs: str | None = option(
        None, """how files are decoded: '{"video": {"num_frames": 16}}'""", group=MEDIA, metavar="JSON"
    )
    mm_processor_kwargs: str | None = option(
        None,
        """what the model's processor gets beside each picture, sound or video: '{"max_pixels": 1003520}'""",
        group=MEDIA,
        metavar="JSON",
    )
    enable_mm_embeds: bool = option(
        False,
        "take image_embeds and audio_embeds in place of pictures and sounds: nobody can look at them; for clients that are trusted",
        group=MEDIA,
    )
    mm_processor_cache_gb: float = option(
        1.0,
        "GiB of processed pictures that are kept for the next turn; 0 keeps none",
        group=MEDIA,
        minimum=0,
        maximum=1024,
        metavar="GIB",
    )
    max_media_memory_gb: float = option(
        16.0,
        "GiB of processed pictures, sounds and videos that requests may hold together; beyond, more are refused (429)",
        group=HTTP,
        minimum=0,
        maximum=16384,
        metavar="GIB",
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "hosts that pictures may be fetched from by their URL: names, *.example.com, or * for all that is public; addresses and "
        "networks of your own where these are meant (default: nothing is fetched)",
        group=MEDIA,
        metavar="HOST",
        several=True,
    )
    allowed_local_media_path: str | None = option(
        None, "folder below which requests may name files (file:///…)", group=MEDIA, metavar="FOLDER"
    )
    media_fetch_timeout: float = seconds(5.0, "seconds in which such a picture has to come", group=MEDIA, minimum=0.1)
    max_media_size: int = option(
        64 * 1024**2,
        "largest file of a picture, sound or video",
        group=MEDIA,
        minimum=1024,
        parse=parse_size,
        metavar="SIZE",
    )
    max_image_pixels: int = option(
        64_000_000, "largest picture, or frame of a video, in pixels", group=MEDIA, minimum=1, maximum=2**31
    )
    max_media_seconds: float = seconds(600.0, "longest sound or video", group=MEDIA, minimum=0.1)

    host: str = option(DEFAULT_HOST, "address to listen on", group=HTTP, metavar="ADDRESS")
    port: int | None = option(
        None,
        f"port to listen on; 0 takes a free one (default: {DEFAULT_PORT})",
        group=HTTP,
        minimum=0,
        maximum=65535,
        metavar="PORT",
    )
    uds: str | None = option(
        None,
        "Unix socket to listen on in place of host and port, for this user and its group",
        group=HTTP,
        metavar="PATH",
    )
    ssl_certfile: str | None = option(
        None,
        "TLS certificate with its chain (PEM); the server then speaks HTTPS only",
        group=HTTP,
        metavar="FILE",
    )
    ssl_keyfile: str | None = option(
        None, "private key of --ssl-certfile (PEM), if it is in another file", group=HTTP, metavar="FILE"
    )
    ssl_ca_certs: str | None = option(
        None, "CA certificates (PEM) that client certificates are checked against", group=HTTP, metavar="FILE"
    )
    ssl_cert_reqs: int = option(
        0, "client certificates: 0 ignored, 1 checked if there is one, 2 required (Python's ssl.CERT_*)",
        group=HTTP, minimum=0, maximum=2,
    )  # fmt: skip
    max_body_size: int = option(
        16 * 1024**2, "largest request body, such as 16MiB", group=HTTP, minimum=1024, parse=parse_size, metavar="SIZE"
    )
    strict_fields: bool = option(
        False, "refuse requests with fields nobody knows, instead of naming those in X-Ignored-Fields", group=HTTP
    )
    max_stored_responses: int = option(
        1000,
        "responses of /v1/responses kept in memory to be retrieved or continued; 0 keeps none",
        group=HTTP,
        minimum=0,
    )
    max_stored_bytes: int = option(
        256 * 1024**2,
        "memory for them, such as 256MiB; beyond either limit the oldest go",
        group=HTTP,
        minimum=0,
        parse=parse_size,
        metavar="SIZE",
    )
    max_total_body_size: int | None = option(
        None,
        "memory for all request bodies that are not yet decoded; beyond it the largest unfinished one gets 503 "
        "(default: 256MiB, or room for four of --max-body-size)",
        group=HTTP,
        minimum=1024,
        parse=parse_size,
        metavar="SIZE",
    )
    max_connections: int = option(
        16384, "connections at a time; the process raises its limit of open files for them", group=HTTP, minimum=1
    )
    max_connections_per_address: int | None = option(
        None, "of these, from one address (default: half of them)", group=HTTP, minimum=1
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "name that a Host header may have, may be given several times; *.example.com is any below it, * any at all "
        "(default: any, but only localhost and addresses where --host is a loopback address)",
        group=HTTP,
        metavar="NAME",
    )
    timeout_head: float = seconds(30.0, "seconds for a request's line and headers; 0 is no limit")
    timeout_body: float = seconds(
        30.0, "seconds in which 16 KiB more of a request's body have to come, or its end; 0 is no limit"
    )
    timeout_keep_alive: float = seconds(60.0, "seconds a connection may wait for its next request; 0 is no limit")
    timeout_write: float = seconds(
        300.0, "seconds in which a client has to read something of what it was sent; 0 is no limit"
    )
    batch_dir: str | None = option(
        None,
        "folder for files and batches (/v1/files, /v1/batches); without it there are none",
        group=HTTP,
        metavar="FOLDER",
    )
    max_batch_file_size: int = option(
        200 * 1024**2,
        "largest file to be uploaded, such as 200MiB",
        group=HTTP,
        minimum=1,
        parse=parse_size,
        metavar="SIZE",
    )
    max_batch_files: int = option(10_000, "files kept at a time, answers of batches included", group=HTTP, minimum=1)
    max_batch_bytes: int = option(
        10 * 1024**3, "disk for all of them, such as 10GiB", group=HTTP, minimum=1, parse=parse_size, metavar="SIZE"
    )
    max_batch_requests: int = option(
        0, "lines of batches at work at a time; 0 is a quarter of --max-num-seqs", group=HTTP, minimum=0
    )
    ping_interval: float = option(
        15.0,
        "seconds of silence before a stream gets an empty line as ping; 0 is never",
        group=HTTP,
        minimum=0,
        maximum=3600,
        metavar="SECONDS",
    )
    request_timeout: float | None = seconds(
        None,
        "seconds after which an answer that is not complete ends with 504, where the request says nothing (`timeout`, "
        "X-Request-Timeout; default: never)",
        minimum=0.001,
    )
    drain_timeout: float = seconds(30.0, "seconds for requests in flight to finish after the first Ctrl-C")

    api_key: tuple[str, ...] = option(
        (),
        "key clients have to show, may be given several times; `ps` shows flags, so better the variable or --api-key-file",
        group=HTTP,
        metavar="KEY",
        secret=True,
    )
    api_key_file: str | None = option(None, "file with more such keys, one a line", group=HTTP, metavar="FILE")
    admin_api_key: str | None = option(
        None,
        "key that opens everything; /metrics and the dashboard then take no other (`ps` shows flags, so better the variable)",
        group=HTTP,
        metavar="KEY",
        secret=True,
    )
    shared_prefix_cache: bool = option(
        False,
        "let requests reuse the prefixes of other API keys: faster, but who guesses another's prompt is told by cached_tokens",
        group=HTTP,
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "origin whose web pages may use this server, such as https://example.com, may be given several times; * is any",
        group=HTTP,
        metavar="ORIGIN",
    )
    cors_credentials: bool = option(False, "let those pages send cookies and HTTP logins", group=HTTP)

    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least severe message shown", group=_LOG)
    log_format: Literal["text", "json"] = option("text", "a line is text for people, or a JSON object", group=_LOG)
    log_requests: bool = option(
        False,
        "log the parameters of every generation, and keep the last prompts and answers for the inspector",
        group=_LOG,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "collector that gets a trace of each request, by OTLP over HTTP, such as http://localhost:4318 (needs oneloop[otel])",
        group=_LOG,
        metavar="URL",
    )
    access_log: bool = option(True, "log every HTTP request", group=_LOG)
    profile_dir: str | None = option(
        None,
        "folder for the traces of /start_profile (default: a fresh one for temporary files)",
        group=HTTP,
        metavar="FOLDER",
    )
    dry_run: bool = option(
        False,
        "print the plan for this model on this machine (memory, context, sequences; kernels with --log-level debug) and end; loads "
        "no weights, but downloads a built-in model that is not cached yet",
        group=HTTP,
    )
    config: str | None = option(None, "YAML file with any of these options", group=_LOG, metavar="FILE")

    def __post_init__(self) -> None:
        """Which of them go together a ServerConfig says."""

    @property
    def listen_port(self) -> int:
        return DEFAULT_PORT if self.port is None else self.port

    @property
    def model(self) -> str:
        """The first, which is served from the start."""
        return self.models[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names clients may use for the first model; the first is the one answers carry."""
        if len(self.models) > 1:
            return (self.served_model_name or self.models)[:1]
        return tuple(dict.fromkeys(self.served_model_name)) or (self.model,)

    def of_one_model(self, what: str) -> Self:
        """Itself. Raises ConfigError where it has several models and `what` is answered by one."""
        if len(self.models) > 1:
            raise ConfigError(f"{what} is answered by one model: give one --model")
        return self

    def each_model(self) -> list[Self]:
        """What this says of each of its models."""
        if len(self.models) == 1:
            return [self]
        names = self.served_model_name or self.models
        return [
            dataclasses.replace(
                self, models=(model,), served_model_name=(name,), max_loaded_models=1, embedding_model=None
            )
            for model, name in zip(self.models, names, strict=True)
        ]
