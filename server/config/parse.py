"""Creates a ServerConfig from flags, `ONELOOP_*` variables and the `--config` file, or from a program's keyword arguments.

A flag overrides the environment, which overrides the file, which overrides the default. Unknown names are rejected. Only the
standard library is imported (and yaml if there is a file), so that `--help` is fast."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.engine_options import ENGINE, MODEL
from server.config import vllm_keywords
from server.config.command_line import option_parser
from server.config.option import ENVIRONMENT_PREFIX, Option, did_you_mean, options_by_name, variable_of
from server.config.server_config import ServerConfig
from server.config.server_options import MEDIA, ConfigError, flag_of

READ_ELSEWHERE = frozenset({"ONELOOP_ISA"})  # no option: ops reads it when it is imported
_OF_KUBERNETES = re.compile(r"(_SERVICE_HOST|_SERVICE_PORT\w*|_PORT_\d+_(TCP|UDP)\w*)=|_PORT=(tcp|udp)://")


def _made(values: Mapping[str, Any], options: Mapping[str, Option]) -> ServerConfig:
    """Return the configuration with `values`, by option name."""
    return ServerConfig(**{options[name].field: value for name, value in values.items()})


def _from_environment(environ: Mapping[str, str], options: Mapping[str, Option]) -> dict[str, Any]:
    names = {variable_of(name): name for name in options}
    values = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in READ_ELSEWHERE:
            continue
        if _OF_KUBERNETES.search(f"{variable}={text}"):
            raise ConfigError(
                f"{variable} was set by Kubernetes for a Service whose name begins with oneloop, and is not an option; set "
                "enableServiceLinks: false in the pod, or rename the Service"
            )
        if variable not in names:
            raise ConfigError(
                f"unknown environment variable {variable}{did_you_mean(variable, names, ENVIRONMENT_PREFIX)}"
            )
        values[names[variable]] = options[names[variable]].read(text, variable)
    return values


def _from_file(path: str, options: Mapping[str, Option]) -> dict[str, Any]:
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
        raise ConfigError(f"--config {path} must contain `option: value` lines")
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
    """Return line and problem of a YAML error. The text of the file is not quoted, because it may contain keys."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    line = f", line {mark.line + 1}" if mark is not None else ""
    return line + (": " + re.sub(r"'[^']{4,}'", "…", problem) if problem else "")


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> ServerConfig:
    """Return the configuration from `argv` (without the program's name), `environ` and the file that one of them names. Raises
    ConfigError; `--help` and `--version` print and raise SystemExit(0)."""
    return config_of(option_parser(options_by_name()).read(argv), environ)


def config_of(given: Mapping[str, Any], environ: Mapping[str, str]) -> ServerConfig:
    """Return the configuration from parsed flags, `environ` and the file they name. `given`: text by option name. Raises
    ConfigError."""
    options = options_by_name()
    flags = {name: options[name].read(value, flag_of(name)) for name, value in given.items()}
    variables = _from_environment(environ, options)
    path = flags.get("config", variables.get("config"))
    return _made((_from_file(path, options) if path else {}) | variables | flags, options)


# Options for servers only: a program has an object per model.
_OF_SERVERS = ("served_model_name", "embedding_model", "speech_model", "max_loaded_models", "enable_model_management")


def keyword_options() -> dict[str, Option]:
    """Return the options that a program may set as keyword arguments: those of model, engine and media."""
    groups = (MODEL, ENGINE, MEDIA)
    options = options_by_name()
    return {n: o for n, o in options.items() if o.metadata["group"] in groups and n not in _OF_SERVERS}


def from_keywords(values: Mapping[str, Any], options: Mapping[str, Option] | None = None) -> ServerConfig:
    """Return the configuration from a program's keyword arguments: options in `options` (None: `keyword_options`), and accepted
    keywords of vLLM. Environment and file are not read. Raises ConfigError."""
    options = options or keyword_options()
    own: dict[str, Any] = {}
    for given, value in values.items():
        name = vllm_keywords.RENAMED.get(given, given)
        if name in options and name not in vllm_keywords.DEFAULTS:
            own[name] = value
        elif not vllm_keywords.is_taken(name, value):
            raise ConfigError(f"unknown option {name!r}{did_you_mean(name, options)}")
    return _made({n: options[n].read(value, n) for n, value in own.items() if value is not None}, options)
