"""ServerConfig: the options of a server, checked for contradictions.

Errors name the option as on the command line, and never contain a key. Of files and folders, only the existence is checked."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from runtime.engine_options import SPECULATES_BY_MODEL
from server.config.server_options import DEFAULT_HOST, ConfigError, ServerOptions, flag_of

_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")
KEY = re.compile(r"[!-~]+")
_ORIGIN = re.compile(r'[a-z][a-z0-9+.-]*://[!"$-)+-.0->\[-~]+')  # visible ASCII but capitals and / ? # @ *

# Options that say nothing of several --model.
_OF_ONE_MODEL = (
    "tokenizer", "revision", "chat_template", "enable_lora", "speculative_model", "speculative_config", "dry_run",
)  # fmt: skip

# Options named in one of these pairs cannot be given together, whatever their values.
EXCLUSIVE = (
    ("kv_cache_bytes", "num_kv_blocks"),
    ("speculative_config", "speculative_method"),
    ("speculative_config", "num_speculative_tokens"),
    ("speculative_config", "speculative_model"),
)


class ServerConfig(ServerOptions):
    """Options of a server. The constructor raises ConfigError if options contradict each other. The class is not a dataclass
    itself, because that would add 5 ms to `--help`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        if complaint := contradiction(self):
            raise ConfigError(complaint)

    def user_keys(self) -> tuple[str, ...]:
        """Return the keys of --api-key and --api-key-file. Raises ConfigError if the file contains no keys or cannot be read."""
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
            if not KEY.fullmatch(key):
                raise ConfigError(
                    f"--api-key-file {self.api_key_file}: line {number} is not one key of visible ASCII characters"
                )
        if not keys:
            raise ConfigError(f"--api-key-file {self.api_key_file} has no key in it")
        return tuple(dict.fromkeys([*self.api_key, *keys.values()]))


def contradiction(options: ServerConfig) -> str | None:
    """Return an error message if options contradict each other, or None. Raises ConfigError if keys cannot be read."""
    seqs, tokens = options.max_num_seqs, options.max_num_batched_tokens
    for one, other in EXCLUSIVE:
        if getattr(options, one) is not None and getattr(options, other) is not None:
            names = {spec.name: spec.metadata["name"] or spec.name for spec in dataclasses.fields(options)}
            return f"{flag_of(names[one])} and {flag_of(names[other])} have the same meaning; use one of them"
    if seqs is not None and tokens is not None and tokens <= seqs:
        return f"--max-num-batched-tokens {tokens} must be greater than --max-num-seqs {seqs}"
    if options.num_speculative_tokens is not None and options.speculative_method is None:
        return "--num-speculative-tokens requires --speculative-method"
    if (options.speculative_model is not None) != (options.speculative_method in SPECULATES_BY_MODEL):
        return f"--speculative-method {' or '.join(SPECULATES_BY_MODEL)} and --speculative-model NAME must be used together"
    for model in options.models:
        is_file = model.endswith(".gguf")
        if options.load_format in ("safetensors", "dummy") and is_file:
            return f"--load-format {options.load_format} contradicts --model {model}, which is a GGUF file"
        if options.load_format == "gguf" and Path(model).is_dir():
            return f"--load-format gguf contradicts --model {model}, which is a folder; name the .gguf file"
        if options.revision is not None and (is_file or Path(model).exists()):
            return f"--revision {options.revision} contradicts --model {model}: files on this disk have no revisions"
    named = options.chat_template is None or not re.search("[./]", options.chat_template)
    if options.chat_template is not None and not named and not Path(options.chat_template).is_file():
        return f"--chat-template {options.chat_template}: no such file"
    if any(not name.strip() for name in options.served_model_name):
        return "--served-model-name is empty"
    if complaint := _bad_models(options):
        return complaint
    if options.embedding_model is not None:
        if options.embedding_model in (name for each in options.each_model() for name in each.served_names):
            return f"--embedding-model {options.embedding_model} is also a name of --model: choose another --served-model-name"
        if options.runner == "pooling":
            return "--runner pooling contradicts --embedding-model, which requires a generating --model"
    if options.speech_model is not None:
        if options.speech_model in (name for each in options.each_model() for name in each.served_names):
            return (
                f"--speech-model {options.speech_model} is also a name of --model: choose another --served-model-name"
            )
        if options.speech_model == options.embedding_model:
            return f"--speech-model {options.speech_model} is also the --embedding-model: use two different models"
    if options.otlp_traces_endpoint is not None and not re.match(r"https?://[^/]", options.otlp_traces_endpoint):
        return f"--otlp-traces-endpoint {options.otlp_traces_endpoint} is not a URL such as http://localhost:4318"
    if options.allowed_local_media_path is not None and not Path(options.allowed_local_media_path).is_dir():
        return f"--allowed-local-media-path {options.allowed_local_media_path}: no such folder"
    if options.profile_dir is not None and not Path(options.profile_dir).is_dir():
        return f"--profile-dir {options.profile_dir}: no such folder"
    return (
        _bad_tls(options)
        or _bad_uds(options)
        or _bad_keys(options)
        or _bad_origins(options)
        or _bad_hosts(options)
        or _bad_adapters(options)
        or _bad_stages(options)
    )


def _bad_stages(options: ServerOptions) -> str | None:
    if options.distributed_executor_backend == "uni":
        return None
    named = f"--distributed-executor-backend {options.distributed_executor_backend}"
    if options.pipeline_parallel_size == 1:
        return f"{named} starts a process for each pipeline stage: add --pipeline-parallel-size"
    for flag, is_asked, instead in (
        ("--data-parallel-size", options.data_parallel_size > 1, "use the replicas of oneloop ray"),
        ("--embedding-model", options.embedding_model is not None, "serve that model by a separate process"),
        ("--speech-model", options.speech_model is not None, "serve that model by a separate process"),
        ("--model twice", len(options.models) > 1, "one model uses all hosts"),
        (
            "--enable-expert-distribution-metrics",
            options.enable_expert_distribution_metrics,
            "each process would report only its own",
        ),
        ("--sleep-after", options.sleep_after is not None, "its stages cannot be unloaded"),
    ):
        if is_asked:
            return f"{flag} is not supported with {named}: {instead}"
    return None


def _bad_models(options: ServerOptions) -> str | None:
    num = len(options.models)
    if num == 1 and not options.enable_model_management:
        if options.max_loaded_models > 1:
            return f"--max-loaded-models {options.max_loaded_models} exceeds the number of --model"
        return None
    names = options.names_by_model
    if num > 1 and len(names) != num:
        return f"there are {num} --model and {len(names)} --served-model-name: give one name per model, or none"
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        return f"two models have the name {twice[0]}: give them different --served-model-name"
    for name in _OF_ONE_MODEL:
        if getattr(options, name):
            several = f"there are {num} --model" if num > 1 else "--enable-model-management serves several"
            return f"{flag_of(name)} applies to one model, but {several}"
    if options.max_loaded_models > 1 and options.kv_cache_bytes is None and options.num_kv_blocks is None:
        return f"--max-loaded-models {options.max_loaded_models} needs --kv-cache-memory, the size of each KV cache"
    return None


def _bad_adapters(options: ServerOptions) -> str | None:
    for flag, given in (
        ("--lora-modules", options.lora_modules), ("--lora-dir", options.lora_dir), ("--lora-resolver", options.lora_resolver),
    ):  # fmt: skip
        if given and not options.enable_lora:
            return f"{flag} needs --enable-lora"
        if isinstance(given, str) and not Path(given).is_dir():
            return f"{flag} {given}: no such folder"
    if options.default_mm_loras is not None and not options.enable_lora:
        return "--default-mm-loras needs --enable-lora"
    return None


def _bad_tls(options: ServerOptions) -> str | None:
    others = ("ssl_keyfile", "ssl_ca_certs")
    for name in ("ssl_certfile", *others):
        path = getattr(options, name)
        if path is not None and not Path(path).is_file():
            return f"{flag_of(name)} {path}: no such file"
    given = [
        *(name for name in others if getattr(options, name)),
        *(["ssl_cert_reqs"] if options.ssl_cert_reqs else []),
    ]
    if options.ssl_certfile is None and given:
        return f"{flag_of(given[0])} needs --ssl-certfile: without it the server uses plain HTTP"
    if options.ssl_cert_reqs and options.ssl_ca_certs is None:
        return f"--ssl-cert-reqs {options.ssl_cert_reqs} needs --ssl-ca-certs to verify client certificates"
    return None


def _bad_uds(options: ServerOptions) -> str | None:
    if options.uds is None:
        return None
    if options.port is not None:
        return f"--uds {options.uds} and --port {options.port} exclude each other; use one of them"
    if options.host != DEFAULT_HOST:
        return f"--uds {options.uds} and --host {options.host} exclude each other; use one of them"
    if not Path(options.uds).parent.is_dir():
        return f"--uds {options.uds}: there is no folder {Path(options.uds).parent}"
    return None


def _bad_keys(options: ServerConfig) -> str | None:
    """Return an error message for invalid keys, which contains no key; None if all keys are valid."""
    for name, given in (("api_key", options.api_key), ("admin_api_key", (options.admin_api_key,))):
        if not all(key is None or KEY.fullmatch(key) for key in given):
            return f"{flag_of(name)} must consist of visible ASCII characters without spaces, because it is sent in a header"
    keys = options.user_keys()
    if options.admin_api_key in keys:
        return "--admin-api-key is also a user's key; use a different key"
    return None


def _bad_origins(options: ServerOptions) -> str | None:
    for origin in options.cors_origin:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            return (
                f"--cors-origin {origin!r} is not an origin as browsers send it: "
                "https://example.com, lower case, with the port if it is unusual, without a path or a slash at the end"
            )
    if "*" in options.cors_origin and len(set(options.cors_origin)) > 1:
        return "--cors-origin * allows every origin; leave out the others"
    if options.cors_credentials and options.cors_origin in ((), ("*",)):
        return "--cors-credentials needs --cors-origin with origins other than *"
    return None


def _bad_hosts(options: ServerOptions) -> str | None:
    for host in options.allowed_host:
        if not _HOST.fullmatch(host):
            return (
                f"--allowed-host {host!r} is not a host's name or address: example.com, *.example.com or *, "
                "lower case, without scheme, port or path"
            )
    return None
