"""ServerConfig: one dataclass field is one option; those of the engine are `runtime.options.EngineOptions`, written there alone.

Flag, `ONELOOP_*` variable, key of the `--config` file, help text and checks are all derived from the field. Precedence:
flag, then environment, then file, then default. What is unknown, out of range or contradictory is refused by the name the
user gave it, so a typing error never becomes a default. Standard library only (yaml when a file is named): `--help`
answers before anything heavy is imported. Knows nothing of models or engines: what an option means is their business."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Self, get_args, get_origin, get_type_hints

from runtime.options import ENGINE, HTTP, MODEL, EngineOptions, option, parse_size
from server import __version__

ENVIRONMENT_PREFIX = "ONELOOP_"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
READ_ELSEWHERE = frozenset({"ONELOOP_ISA"})  # no option: ops reads it when it is imported
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_OF_KUBERNETES = re.compile(r"(_SERVICE_HOST|_SERVICE_PORT\w*|_PORT_\d+_(TCP|UDP)\w*)=|_PORT=(tcp|udp)://")
_KEY = re.compile(r"[!-~]+")
_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")
_ORIGIN = re.compile(r'[a-z][a-z0-9+.-]*://[!"$-)+-.0->\[-~]+')  # visible ASCII but capitals and / ? # @ *


def seconds(default: float | None, text: str, *, minimum: float = 0) -> Any:
    """An option of the server that is a time."""
    return option(default, text, group=HTTP, minimum=minimum, maximum=86400, metavar="SECONDS")


class ConfigError(Exception):
    """An option that cannot be honoured. The message names it as the user wrote it."""


_LOG = "logging"
_GROUPS = (MODEL, ENGINE, HTTP, _LOG)  # in the order of --help


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(EngineOptions):
    """Everything a user can ask for, as asked: None and "auto" are resolved by whoever owns the matter."""

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
        "name clients use, may be given several times; the first is the one in answers (default: --model); of several --model "
        "each has one, in their order",
        group=MODEL,
        metavar="NAME",
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
        group=HTTP,
    )
    structured_outputs_closed: bool = option(
        True, "keep JSON objects to the properties that their schema lists, unless it says that there may be others",
        group=HTTP,
    )  # fmt: skip

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
        "certificate in PEM, and those that vouch for it: the server speaks HTTPS, and nothing else",
        group=HTTP,
        metavar="FILE",
    )
    ssl_keyfile: str | None = option(
        None, "its private key, if that is not in the same file", group=HTTP, metavar="FILE"
    )
    ssl_ca_certs: str | None = option(
        None, "certificates in PEM of who vouches for clients", group=HTTP, metavar="FILE"
    )
    ssl_cert_reqs: int = option(
        0, "certificates of clients: 0 not asked for, 1 checked where there is one, 2 required (Python's ssl.CERT_*)",
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
        False, "print what the options come to for this model on this machine, load nothing, and end", group=HTTP
    )
    config: str | None = option(None, "YAML file with any of these options", group=_LOG, metavar="FILE")

    # Options that say nothing of several --model.
    _OF_ONE_MODEL: ClassVar[tuple[str, ...]] = (
        "tokenizer", "revision", "chat_template", "enable_lora", "speculative_model", "speculative_config", "dry_run",
    )  # fmt: skip

    # Options named in one of these pairs cannot be given together, whatever their values.
    EXCLUSIVE: ClassVar[tuple[tuple[str, str], ...]] = (
        ("kv_cache_bytes", "num_kv_blocks"),
        ("max_num_mixed_tokens", "max_itl"),
        ("max_num_mixed_tokens", "target_ttft"),
        ("speculative_config", "speculative_method"),
        ("speculative_config", "num_speculative_tokens"),
        ("speculative_config", "speculative_model"),
    )

    def __post_init__(self) -> None:
        if complaint := self._contradiction():
            raise ConfigError(complaint)

    def _contradiction(self) -> str | None:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        for one, other in self.EXCLUSIVE:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                names = {spec.name: spec.metadata["name"] or spec.name for spec in dataclasses.fields(self)}
                return f"{flag_of(names[one])} and {flag_of(names[other])} say the same thing twice; give one of them"
        if seqs is not None and tokens is not None and tokens <= seqs:
            return f"--max-num-batched-tokens {tokens} has to be more than --max-num-seqs {seqs}"
        if self.num_speculative_tokens is not None and self.speculative_method is None:
            return (
                "--num-speculative-tokens says how many, and --speculative-method has to say by what they are guessed"
            )
        if (self.speculative_model is not None) != (self.speculative_method == "draft_model"):
            return "--speculative-method draft_model and --speculative-model NAME belong together"
        for model in self.models:
            is_file = model.endswith(".gguf")
            if self.load_format in ("safetensors", "dummy") and is_file:
                return f"--load-format {self.load_format} contradicts --model {model}, which is a GGUF file"
            if self.load_format == "gguf" and Path(model).is_dir():
                return f"--load-format gguf contradicts --model {model}, which is a folder; name the .gguf file"
            if self.revision is not None and (is_file or Path(model).exists()):
                return f"--revision {self.revision} contradicts --model {model}: files on this disk have no revisions"
        named = self.chat_template is None or not re.search("[./]", self.chat_template)
        if self.chat_template is not None and not named and not Path(self.chat_template).is_file():
            return f"--chat-template {self.chat_template}: no such file"
        if any(not name.strip() for name in self.served_model_name):
            return "--served-model-name is empty"
        if complaint := self._bad_models():
            return complaint
        if self.embedding_model is not None:
            if self.embedding_model in (name for each in self.each_model() for name in each.served_names):
                return f"--embedding-model {self.embedding_model} has a name of --model: give that another --served-model-name"
            if self.runner == "pooling":
                return "--runner pooling contradicts --embedding-model, beside which --model generates"
        if self.max_total_body_size is not None and self.max_total_body_size < self.max_body_size:
            return f"--max-total-body-size {self.max_total_body_size} is less than --max-body-size {self.max_body_size}"
        if self.sleep_after is not None and self.enable_lora:
            return "--sleep-after and --enable-lora cannot be given together: a model with adapters stays awake"
        if self.otlp_traces_endpoint is not None and not re.match(r"https?://[^/]", self.otlp_traces_endpoint):
            return f"--otlp-traces-endpoint {self.otlp_traces_endpoint} is not a URL such as http://localhost:4318"
        if self.profile_dir is not None and not Path(self.profile_dir).is_dir():
            return f"--profile-dir {self.profile_dir}: no such folder"
        return (
            self._bad_tls()
            or self._bad_uds()
            or self._bad_keys()
            or self._bad_origins()
            or self._bad_hosts()
            or self._bad_adapters()
        )

    def _bad_models(self) -> str | None:
        num = len(self.models)
        if num == 1:
            if self.max_loaded_models > 1:
                return f"--max-loaded-models {self.max_loaded_models} needs as many --model"
            return None
        if self.served_model_name and len(self.served_model_name) != num:
            return f"there are {num} --model and {len(self.served_model_name)} --served-model-name: give each one, or none of them"
        names = self.served_model_name or self.models
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            return f"two models are called {twice[0]}: give each another --served-model-name"
        for name in self._OF_ONE_MODEL:
            if getattr(self, name):
                return f"{flag_of(name)} is about one model, and there are {num} --model"
        if self.max_loaded_models > 1 and self.kv_cache_bytes is None and self.num_kv_blocks is None:
            return f"--max-loaded-models {self.max_loaded_models} needs --kv-cache-memory: what each of them has"
        return None

    def _bad_adapters(self) -> str | None:
        for flag, given in (
            ("--lora-modules", self.lora_modules), ("--lora-dir", self.lora_dir), ("--lora-resolver", self.lora_resolver),
        ):  # fmt: skip
            if given and not self.enable_lora:
                return f"{flag} needs --enable-lora"
            if isinstance(given, str) and not Path(given).is_dir():
                return f"{flag} {given}: no such folder"
        return None

    def _bad_tls(self) -> str | None:
        others = ("ssl_keyfile", "ssl_ca_certs")
        for name in ("ssl_certfile", *others):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                return f"{flag_of(name)} {path}: no such file"
        given = [*(name for name in others if getattr(self, name)), *(["ssl_cert_reqs"] if self.ssl_cert_reqs else [])]
        if self.ssl_certfile is None and given:
            return f"{flag_of(given[0])} needs --ssl-certfile: without it the server speaks plain HTTP"
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            return f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs: who vouches for clients"
        return None

    def _bad_uds(self) -> str | None:
        if self.uds is None:
            return None
        if self.port is not None:
            return f"--uds {self.uds} and --port {self.port} are two places to listen on; give one of them"
        if self.host != DEFAULT_HOST:
            return f"--uds {self.uds} and --host {self.host} are two places to listen on; give one of them"
        if not Path(self.uds).parent.is_dir():
            return f"--uds {self.uds}: there is no folder {Path(self.uds).parent}"
        return None

    def _bad_keys(self) -> str | None:
        """Never with the key in it."""
        for name, given in (("api_key", self.api_key), ("admin_api_key", (self.admin_api_key,))):
            if not all(key is None or _KEY.fullmatch(key) for key in given):
                return (
                    f"{flag_of(name)} has to be visible ASCII characters without spaces, since it travels in a header"
                )
        keys = self.user_keys()
        if self.admin_api_key in keys:
            return "--admin-api-key is a user's key as well; it has to be another one"
        return None

    def _bad_origins(self) -> str | None:
        for origin in self.cors_origin:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                return (
                    f"--cors-origin {origin!r} is not an origin as browsers send it: "
                    "https://example.com, lower case, with the port if it is unusual, without a path or a slash at the end"
                )
        if "*" in self.cors_origin and len(set(self.cors_origin)) > 1:
            return "--cors-origin * allows every origin; leave out the others"
        if self.cors_credentials and self.cors_origin in ((), ("*",)):
            return "--cors-credentials needs origins named by --cors-origin, and not *"
        return None

    def _bad_hosts(self) -> str | None:
        for host in self.allowed_host:
            if not _HOST.fullmatch(host):
                return (
                    f"--allowed-host {host!r} is not a host's name or address: example.com, *.example.com or *, "
                    "lower case, without scheme, port or path"
                )
        return None

    def user_keys(self) -> tuple[str, ...]:
        """Keys of --api-key and of --api-key-file. Raises ConfigError where the file has none or cannot be read."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise ConfigError(f"--api-key-file {self.api_key_file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"--api-key-file {self.api_key_file} is not text") from None
        keys = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
        for number, key in keys.items():
            if not _KEY.fullmatch(key):
                raise ConfigError(
                    f"--api-key-file {self.api_key_file}: line {number} is not one key of visible ASCII characters"
                )
        if not keys:
            raise ConfigError(f"--api-key-file {self.api_key_file} has no key in it")
        return tuple(dict.fromkeys([*self.api_key, *keys.values()]))

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

    def each_model(self) -> list[ServerConfig]:
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


# --- one option ---------------------------------------------------------------------------------------------------


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


@dataclass(frozen=True, slots=True)
class _Option:
    """A field of ServerConfig with its annotation taken apart. `name`: the user's word for it; `field`: where it is kept."""

    name: str
    field: str
    kind: type  # str, int, float, bool, tuple, or what `parse` makes of text or of what YAML made
    choices: tuple[str, ...]
    default: Any
    metadata: Mapping[str, Any]

    def read(self, value: Any, source: str) -> Any:
        """`value` as text, or as YAML made it, turned into the field's type; `source` is the name in complaints."""
        if self.kind is tuple:
            items = value if isinstance(value, (list, tuple)) else [value]
            if self.metadata["secret"] and not items:
                raise ConfigError(f"{source} is empty")  # whoever wrote it does not want an open server
            return tuple(self._read_text(item, source) for item in items)
        if self.kind not in (str, int, float, bool):
            return self._read_other(value, source)
        number = self._read_number(value, source) if self.kind in (int, float) else None
        if number is not None:
            return self._in_range(number, source)
        return self._read_bool(value, source) if self.kind is bool else self._read_text(value, source)

    def _read_text(self, value: Any, source: str) -> str:
        if self.metadata["secret"] and not isinstance(value, str):
            raise ConfigError(f"{source} is not text; put it in quotes")  # YAML would have changed 0123 or 1_000
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise ConfigError(f"{source}: {value!r} is not text")
        text = str(value)
        if self.choices and text not in self.choices:
            raise ConfigError(
                f"{source}: {text!r} is not one of {', '.join(self.choices)}{did_you_mean(text, self.choices)}"
            )
        if not text.strip():
            raise ConfigError(f"{source} is empty")
        return text

    def _read_bool(self, value: Any, source: str) -> bool:
        text = str(value).strip().lower()
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise ConfigError(f"{source}: {value!r} is neither true nor false")

    def _read_other(self, value: Any, source: str) -> Any:
        try:
            return value if isinstance(value, self.kind) else self.metadata["parse"](value)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from None

    def _read_number(self, value: Any, source: str) -> int | float:
        parse = self.metadata["parse"] or self.kind
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ConfigError(f"{source}: {value!r} is not a number")
        try:
            number: int | float = parse(str(value))
        except ValueError as error:
            why = str(error) if self.metadata["parse"] else f"is not {'a whole' if self.kind is int else 'a'} number"
            raise ConfigError(f"{source}: {value!r} {why}") from None
        return number

    def _in_range(self, number: int | float, source: str) -> int | float:
        minimum, maximum = self.metadata["minimum"], self.metadata["maximum"]
        # Written so that NaN, which compares as false with everything, is refused.
        if not ((minimum is None or number >= minimum) and (maximum is None or number <= maximum)):
            bounds = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise ConfigError(f"{source}: {number} is out of range, it has to be {bounds}")
        return number

    def help(self) -> str:
        default = "" if self.default in (None, ()) else f"; default {_shown(self.default)}"
        return f"{self.metadata['text']} [{variable_of(self.name)}{default}]".replace("%", "%%")

    def metavar(self) -> str | None:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return self.metadata["metavar"] or ("N" if self.kind is int else "TEXT")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, int) and value >= 1024**2 and value % 1024**2 == 0:
        return f"{value // 1024**2}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _options() -> dict[str, _Option]:
    hints = get_type_hints(ServerConfig)
    options = {}
    for spec in dataclasses.fields(ServerConfig):
        hint = hints[spec.name]
        kinds = (
            [kind for kind in get_args(hint) if kind is not type(None)]
            if get_origin(hint) not in (Literal, tuple)
            else [hint]
        )
        kind = kinds[0] if kinds else hint
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        plain = str if choices else (tuple if get_origin(kind) is tuple else kind)
        name = spec.metadata["name"] or spec.name
        options[name] = _Option(name, spec.name, plain, choices, spec.default, spec.metadata)
    engines = {spec.name for spec in dataclasses.fields(EngineOptions)}
    in_order = sorted(options.values(), key=lambda opt: (_GROUPS.index(opt.metadata["group"]), opt.field in engines))
    return {opt.name: opt for opt in in_order}


class Flag(NamedTuple):
    """An option as a command line has it. `takes`: what stands behind it: None, "file", "folder" or "word", of which `values` are
    all, where there are any."""

    names: tuple[str, ...]
    text: str
    values: tuple[str, ...]
    takes: str | None


def flags() -> list[Flag]:
    """All there are, in the order of --help."""
    return [
        Flag(
            (flag_of(opt.name), f"--no-{flag_of(opt.name)[2:]}")
            if opt.kind is bool
            else (flag_of(opt.name), *opt.metadata["aliases"]),
            opt.metadata["text"],
            opt.choices,
            None if opt.kind is bool else _TAKES.get(opt.metadata["metavar"], "word"),
        )
        for opt in _options().values()
    ]


_TAKES = {"FILE": "file", "PATH": "file", "MODEL": "file", "FOLDER": "folder"}


def _made(values: Mapping[str, Any], options: Mapping[str, _Option]) -> ServerConfig:
    """`values`: by the user's names."""
    return ServerConfig(**{options[name].field: value for name, value in values.items()})


def did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


# --- the three sources --------------------------------------------------------------------------------------------


COMMANDS = ("serve", "chat", "complete", "batch", "bench", "health", "models", "lora", "doctor", "completion")
USAGE = (
    "oneloop [serve [MODEL]] [options]\n       oneloop chat|complete [PROMPT] [--url URL] [options]\n"
    "       oneloop batch IN OUT [--resume] [options]\n       oneloop bench COMMAND [options]\n"
    "       oneloop health [live|ready|generate] [options]\n       oneloop models\n"
    "       oneloop lora inspect FOLDER [--model MODEL]\n"
    "       oneloop doctor [--json]\n       oneloop completion bash|zsh|fish"
)


def command_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """One of COMMANDS, serve where none is named, and what is behind it; a model after `serve` as --model.

    Raises ConfigError."""
    if not argv or argv[0].startswith("-"):
        return "serve", [*argv]
    command, *rest = argv
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        if not hint and ("/" in command or command.endswith(".gguf")):
            hint = f" (did you mean oneloop serve {command}?)"
        raise ConfigError(f"unknown command {command!r}{hint}; the commands are {', '.join(COMMANDS)}")
    if command == "serve" and rest and not rest[0].startswith("-"):
        model, *rest = rest
        if any(word.partition("=")[0] == "--model" for word in rest):
            raise ConfigError(f"the model is named twice, as {model} and by --model")
        rest = ["--model", model, *rest]
    return command, rest


class CommandParser(argparse.ArgumentParser):
    """Raises ConfigError in place of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message[:1].lower() + message[1:])


def _parser(options: Mapping[str, _Option]) -> CommandParser:
    width = min(120, shutil.get_terminal_size().columns)
    parser = CommandParser(
        prog="oneloop",
        usage=USAGE,
        description="Serve a language model over the OpenAI API. Without options: SmolLM2-135M-Instruct on 127.0.0.1:8000. "
        "MODEL is the same as --model. `chat` talks at the terminal, `complete` goes on with a text, "
        "`batch` answers a file of requests, `bench` measures any server, `models` lists what can be served, "
        "`lora inspect` looks at an adapter, `doctor` at this machine, `health` asks a server here whether it is well; "
        "`python -m server` is another name of oneloop.",
        epilog="Every option is also an environment variable (in brackets) and a key of the --config file. "
        "A flag beats the environment, the environment beats the file. Once it serves, ask from another terminal: "
        "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{\"messages\": "
        '[{"role": "user", "content": "Name the capital of France."}]}\', or in a browser at http://127.0.0.1:8000.',
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=width),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"oneloop {__version__}")
    groups: dict[str, Any] = {}
    for opt in options.values():
        title = opt.metadata["group"]
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        if opt.kind is bool:
            group.add_argument(flag_of(opt.name), dest=opt.name, action=argparse.BooleanOptionalAction, help=opt.help())
        else:
            action = "append" if opt.kind is tuple else "store"
            flags = (flag_of(opt.name), *opt.metadata["aliases"])
            how: dict[str, Any] = {"action": "extend", "nargs": "+"} if opt.metadata["several"] else {"action": action}
            group.add_argument(*flags, dest=opt.name, metavar=opt.metavar(), help=opt.help(), **how)
    return parser


def _from_flags(argv: Sequence[str], options: Mapping[str, _Option]) -> dict[str, Any]:
    parser = _parser(options)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            secret = {flag_of(opt.name) for opt in options.values() if opt.metadata["secret"]}
            if any(arg.partition("=")[0] in secret for arg in argv):
                raise ConfigError(
                    "unexpected argument, not shown since it may be a key; a flag takes one key at a time"
                )
            raise ConfigError(
                f"unexpected argument {word!r}; the model comes first (oneloop serve MODEL), and options start with --"
            )
        flags = [*map(flag_of, options), *(f"--no-{flag_of(o.name)[2:]}" for o in options.values() if o.kind is bool)]
        raise ConfigError(f"unknown option {word}{did_you_mean(word, flags)}")
    return {name: options[name].read(value, flag_of(name)) for name, value in vars(given).items()}


def _from_environment(environ: Mapping[str, str], options: Mapping[str, _Option]) -> dict[str, Any]:
    names = {variable_of(name): name for name in options}
    values = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in READ_ELSEWHERE:
            continue
        if _OF_KUBERNETES.search(f"{variable}={text}"):
            raise ConfigError(
                f"{variable} is what Kubernetes sets for a Service whose name begins with oneloop, and no option; give the pod "
                "enableServiceLinks: false, or the Service another name"
            )
        if variable not in names:
            raise ConfigError(f"unknown environment variable {variable}{did_you_mean(variable, names)}")
        values[names[variable]] = options[names[variable]].read(text, variable)
    return values


def _from_file(path: str, options: Mapping[str, _Option]) -> dict[str, Any]:
    import yaml  # 30 ms that only a --config file has to pay

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path} is not YAML: not UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML{_where(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} has to hold `option: value` lines")
    known = {name.replace("_", "-"): name for name in options if name != "config"}
    values = {}
    for key, value in content.items():
        name = known.get(str(key).replace("_", "-"))
        if name is None:
            raise ConfigError(f"{path}: unknown option {key!r}{did_you_mean(str(key).replace('_', '-'), known)}")
        if value is not None or options[name].metadata["secret"]:
            values[name] = options[name].read(value, f"{path}: {key}")
    return values


def _where(error: Exception) -> str:
    """Line and problem of a YAML error, without what it quotes from the file: that may be a key."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    line = f", line {mark.line + 1}" if mark is not None else ""
    return line + (": " + re.sub(r"'[^']{4,}'", "…", problem) if problem else "")


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> ServerConfig:
    """The configuration asked for by `argv` (without the program's name), `environ` and the file they name.

    Raises ConfigError; `--help` and `--version` print and raise SystemExit(0)."""
    options = _options()
    flags = _from_flags(argv, options)
    variables = _from_environment(environ, options)
    path = flags.get("config", variables.get("config"))
    return _made((_from_file(path, options) if path else {}) | variables | flags, options)


# Keywords of vLLM's LLM that scripts carry along: what they may say here, and why nothing else.
_VLLM_KEYWORDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "pipeline_parallel_size": ((1,), "a model runs on one device here"),
    "trust_remote_code": ((False,), "code that comes with a model is never run; models that need it cannot be served"),
    "disable_log_stats": ((True, False), ""),
    "task": (("auto", "generate"), "runner='pooling' serves a model to be pooled, and convert says what for"),
}


def _says_nothing(name: str, value: Any) -> bool:
    """Whether a keyword of vLLM's asks for what is the case here anyway. Raises ConfigError where it asks for more."""
    if name not in _VLLM_KEYWORDS:
        return False
    allowed, why = _VLLM_KEYWORDS[name]
    if value is not None and value not in allowed:
        raise ConfigError(f"{name}={value!r} is not supported: {why}")
    return True


def from_keywords(values: Mapping[str, Any]) -> ServerConfig:
    """The configuration asked for by a program: options of model and engine by their field's name, None for the default.
    Neither environment nor file is read.

    Raises ConfigError, which names the option as the program does."""
    groups, hidden = (
        (MODEL, ENGINE),
        ("served_model_name", "embedding_model", "max_loaded_models", "unloaded_weights"),
    )  # a program's objects tell its models apart
    options = {n: o for n, o in _options().items() if o.metadata["group"] in groups and n not in hidden}
    values = {name: value for name, value in values.items() if not _says_nothing(name, value)}
    for name in values:
        if name not in options:
            raise ConfigError(f"unknown option {name!r}{did_you_mean(name, options)}")
    return _made({n: options[n].read(value, n) for n, value in values.items() if value is not None}, options)
