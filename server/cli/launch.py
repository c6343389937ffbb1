"""Command `oneloop launch CLIENT`: starts a third-party client that uses a running server.

The client gets its configuration by environment and command line only; none of its files is written. `--print` prints both."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from server.cli.arguments import KEY_VARIABLES
from server.config.command_line import CommandParser
from server.config.option import did_you_mean
from server.config.parse import config_of
from server.config.server_options import ConfigError
from server.process.running import running
from server.process.terminal import url_of

NO_KEY = "none"  # clients require a key even if the server does not
ASK_LIMIT_S = 5.0
AGENT_TOKENS = 32_768  # of a coding agent's first request: measured between 10 and 25 thousand
ANSWER_SHARE = 4  # of the context a quarter is for an answer, where a client asks for a fixed number of tokens


class Served(NamedTuple):
    """Model of a running server. `url`: address without /v1. `max_model_len`: context in tokens, if the server reports it."""

    url: str
    key: str
    model: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Launch:
    """Command-line arguments and additional environment variables for a client."""

    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Client:
    """Third-party client: its program, the command that installs it, and its settings for a served model. `prompt_tokens`:
    approximate number of tokens of its own instructions and tools."""

    program: str
    install: str
    launch: Callable[[Served], Launch]
    prompt_tokens: int = 0


def _codex(served: Served) -> Launch:
    """Return the settings of codex: a provider with the Responses API. See https://github.com/openai/codex, config.md."""
    settings = {
        "model_provider": "oneloop",
        "model_providers.oneloop.name": "oneloop",
        "model_providers.oneloop.base_url": f"{served.url}/v1",
        "model_providers.oneloop.env_key": "ONELOOP_API_KEY",
        "model_providers.oneloop.wire_api": "responses",
    }
    numbers = {} if served.max_model_len is None else {"model_context_window": served.max_model_len}
    words = [f"{name}={json.dumps(value)}" for name, value in {**settings, **numbers}.items()]
    arguments = ["--model", served.model, *(word for each in words for word in ("-c", each))]
    return Launch(arguments, {"ONELOOP_API_KEY": served.key})


def _claude(served: Served) -> Launch:
    """Return the settings of claude: a gateway with the Messages API. See
    https://docs.anthropic.com/en/docs/claude-code/settings."""
    environment = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        **{f"ANTHROPIC_DEFAULT_{size}_MODEL": served.model for size in ("OPUS", "SONNET", "HAIKU")},
        "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if served.max_model_len is not None:
        environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(served.max_model_len // ANSWER_SHARE)
    return Launch(["--model", served.model], environment)


def _opencode(served: Served) -> Launch:
    """Return the settings of opencode: a provider, by an environment variable. See https://opencode.ai/docs/config."""
    model: dict[str, Any] = {"name": served.model}
    if served.max_model_len is not None:
        model["limit"] = {"context": served.max_model_len, "output": served.max_model_len // ANSWER_SHARE}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "oneloop",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
        "models": {served.model: model},
    }
    name = f"oneloop/{served.model}"
    settings = {"provider": {"oneloop": provider}, "model": name, "small_model": name}
    return Launch([], {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _aider(served: Served) -> Launch:
    """Return the settings of aider: an OpenAI-compatible server. See https://aider.chat/docs/llms/openai-compat.html."""
    environment = {"OPENAI_API_BASE": f"{served.url}/v1", "OPENAI_API_KEY": served.key}
    return Launch(["--model", f"openai/{served.model}", "--no-show-model-warnings"], environment)


def _openwebui(served: Served) -> Launch:
    """Return the settings of openwebui: an OpenAI endpoint. See https://docs.openwebui.com/getting-started/env-configuration."""
    environment = {
        "OPENAI_API_BASE_URL": f"{served.url}/v1",
        "OPENAI_API_KEY": served.key,
        "DEFAULT_MODELS": served.model,
        "ENABLE_OLLAMA_API": "false",
    }
    return Launch(["serve"], environment)


CLIENTS: Mapping[str, Client] = {
    "codex": Client("codex", "npm install -g @openai/codex", _codex, AGENT_TOKENS),
    "claude": Client("claude", "npm install -g @anthropic-ai/claude-code", _claude, AGENT_TOKENS),
    "opencode": Client("opencode", "npm install -g opencode-ai", _opencode, AGENT_TOKENS),
    "aider": Client("aider", "pipx install aider-chat", _aider),
    "openwebui": Client("open-webui", "pipx install open-webui", _openwebui),
}


def main(argv: Sequence[str]) -> int:
    """Replace this process by the client, or return an exit code if that is not possible. Raises ConfigError."""
    cut = [*argv].index("--") if "--" in argv else len(argv)
    parser = CommandParser(
        prog="oneloop launch", usage=f"oneloop launch {'|'.join(CLIENTS)} [options] [-- arguments of the client]",
        description="Start a client that uses a running server. The client's configuration files are not changed.",
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    parser.add_argument("client", nargs="?", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--model", metavar="MODEL", help="model name on the server (default: the first one)")
    parser.add_argument(
        "--url", metavar="URL", help="URL of the server (default: the server that runs on this machine)"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"API key of the server (default: {' or '.join(KEY_VARIABLES)} in the environment)",
    )
    parser.add_argument(
        "--print", action="store_true", help="print the commands that start the client, without starting it"
    )
    given = parser.read(argv[:cut])
    name = given.get("client", "")
    if name not in CLIENTS:
        raise ConfigError(f"launch: {name!r} is not one of {', '.join(CLIENTS)}{did_you_mean(name, CLIENTS)}")
    client = CLIENTS[name]
    served = _served(given.get("url"), given.get("model"), given.get("api_key"), os.environ)
    launch = client.launch(served)
    words = [client.program, *launch.arguments, *argv[cut + 1 :]]
    if given.get("print"):
        print(by_hand(words, launch.environment))
        return 0
    if shutil.which(client.program) is None:
        raise ConfigError(f"launch: {client.program} is not installed: run {client.install}")
    print(f"{client.program} uses {served.model} at {served.url}", file=sys.stderr, flush=True)
    if client.prompt_tokens > (served.max_model_len or client.prompt_tokens):
        print(
            f"oneloop: {client.program} sends instructions of up to {client.prompt_tokens:,} tokens, and the model's context has "
            f"{served.max_model_len:,}: serve a model with a longer context",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    os.execvpe(client.program, words, {**os.environ, **launch.environment})
    return 0  # not reached: the client has taken the place of this process


def by_hand(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return shell commands that start a client with arguments `words` and `environment`."""
    return "\n".join(
        [*(f"export {name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(words)]
    )


def _served(url: str | None, model: str | None, key: str | None, environment: Mapping[str, str]) -> Served:
    """List the server's models, and return the model to use. Raises ConfigError if the server does not respond or lacks `model`."""
    import httpx

    key = key or next((environment[name] for name in KEY_VARIABLES if environment.get(name)), None)
    base = _base(url, environment)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        response = httpx.get(f"{base}/v1/models", headers=headers, timeout=ASK_LIMIT_S)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ConfigError(f"launch: {base} requires an API key: use --api-key, or set {KEY_VARIABLES[0]}")
        listed = {entry["id"]: entry.get("max_model_len") for entry in response.raise_for_status().json()["data"]}
    except httpx.HTTPError as error:
        raise ConfigError(
            f"launch: no server responds at {base} ({error}): start one with oneloop serve MODEL"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"launch: {base} is not an OpenAI-compatible server") from None
    if not listed or (model is not None and model not in listed):
        raise ConfigError(f"launch: {base} has no model {model or 'at all'}; it serves {', '.join(listed) or 'none'}")
    model = model or next(iter(listed))
    return Served(base, key or NO_KEY, model, listed[model])


def _base(url: str | None, environment: Mapping[str, str]) -> str:
    """Return the URL of the server, without /v1. If `url` is None, return the URL of the only server that runs on this machine."""
    if url is None:
        servers = running()
        config = config_of(
            {}, {name: value for name, value in environment.items() if name in ("ONELOOP_HOST", "ONELOOP_PORT")}
        )
        url = servers[0].url if len(servers) == 1 else url_of((config.host, config.listen_port))
    if url.startswith("unix:"):
        raise ConfigError(
            f"launch: clients need a port, but the server listens on {url}: restart it with --port instead of --uds"
        )
    return url.rstrip("/").removesuffix("/v1")
