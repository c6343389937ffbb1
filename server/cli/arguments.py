"""Arguments of `oneloop chat` and `oneloop complete`, and the choice between a server and a model in this process.

Other arguments are engine options, parsed as for `oneloop serve`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.cli.attachments import Part, part_of
from server.config.command_line import CommandParser, add_options
from server.config.option import options_by_name
from server.config.parse import config_of
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError, flag_of
from server.http.wire_fields import DrawFields

if TYPE_CHECKING:
    from server.cli.answerers import Answerer

USAGES = {"run": "run NAME"}
ASK_LIMIT_S = 1.0  # to look for a running server
KEY_VARIABLES = ("ONELOOP_API_KEY", "OPENAI_API_KEY")  # in this order
NUMBERS = (*DrawFields.__struct_fields__, "max_tokens")  # what /set knows
NUMBER_FLAGS = [name for name in NUMBERS if not name.endswith("_penalty")]
SHOWN_FLAGS = ("temperature", "top_p", "max_tokens", "seed")
DESCRIPTIONS = {
    "run": "Chat with a model by its short name, hub id or path: with a running server that has it, or in this process. A question "
    "on the command line, or by a pipe, is answered once.",
    "chat": "Talk to a model at the terminal. A question on the command line, or by a pipe, is answered once.",
    "complete": "Continue a text, given on the command line or through a pipe.",
}


@dataclass(frozen=True, slots=True)
class ChatArguments:
    """Arguments of a chat. `url`: the server; None runs a model in this process, with the options `config`. `fields`: fields of
    every request, with OpenAI's names. `attached`: files sent with the first question."""

    prompt: str
    system: str
    fields: Mapping[str, Any]
    url: str | None
    api_key: str | None
    model: str | None
    config: ServerConfig | None
    attached: Sequence[Part] = ()


def arguments_or_exit_code(
    command: str, argv: Sequence[str], check: Callable[[ServerConfig], None]
) -> ChatArguments | int:
    """Return the parsed arguments of this process. For invalid options, print the reason and return the exit code 2."""
    try:
        arguments = read_arguments(command, argv, os.environ)
        if arguments.config is not None:
            check(arguments.config)
        return arguments
    except ConfigError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 2


def read_arguments(command: str, argv: Sequence[str], environment: Mapping[str, str]) -> ChatArguments:
    """Return the parsed arguments of `command`. Prompt and options may be in any order. Raises ConfigError; `--help` prints and
    raises SystemExit(0)."""
    usage = f"oneloop {USAGES.get(command, command)} [PROMPT] [options]"
    parser = CommandParser(
        prog=f"oneloop {command}", usage=usage, description=DESCRIPTIONS[command],
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
        epilog="Without --url, the model and engine options of `oneloop serve` are accepted too.",
    )  # fmt: skip
    add = parser.add_argument
    add("prompt", nargs="*", help=argparse.SUPPRESS)
    if command != "run":
        add(
            "--model",
            metavar="MODEL",
            help="model, as for `oneloop serve`; with --url, its name there (default: the first listed)",
        )
    add(
        "--url",
        metavar="URL",
        help="OpenAI endpoint to use, such as http://127.0.0.1:8000 or unix:PATH, instead of a model in this process",
    )
    add(
        "--api-key",
        metavar="KEY",
        help=f"API key of the endpoint (default: {' or '.join(KEY_VARIABLES)} in the environment)",
    )
    if command != "complete":
        add("--system", metavar="TEXT", help="system prompt, sent before the conversation")
        add(
            "--file",
            metavar="PATH",
            action="append",
            help="image, audio, video or text file for the first question; repeatable",
        )
    for name in NUMBER_FLAGS:
        add("--" + name.replace("_", "-"), metavar="N", help=None if name in SHOWN_FLAGS else argparse.SUPPRESS)
    add_options(parser, options_by_name())
    given = parser.read(argv)
    fields: dict[str, Any] = {}
    for name in NUMBER_FLAGS:
        if name in given:
            fields |= read_value(name, given.pop(name))
    words, system = given.pop("prompt", []), given.pop("system", "")
    url, api_key, model = (given.pop(name, None) for name in ("url", "api_key", "model"))
    attached = _attached(given.pop("file", ()))
    if command == "run":
        if model is not None or not words:
            raise ConfigError("run: the model comes first: oneloop run NAME [PROMPT]; oneloop models lists names")
        model, *words = words
    key = api_key or next((environment[name] for name in KEY_VARIABLES if environment.get(name)), None)
    if url is not None and given:
        flag = flag_of(next(iter(given)))
        raise ConfigError(f"{flag} configures a model in this process; leave it out, since --url names a server")
    if url is None:
        config = config_of(given | ({} if model is None else {"model": [model]}), environment).of_one_model(
            "this command"
        )
        if command == "run" and not given:
            url = serving(config, model, key)
    prompt = " ".join(words)
    if url is not None:
        return ChatArguments(prompt, system, fields, url, key, model, None, attached)
    return ChatArguments(prompt, system, fields, None, None, None, config, attached)


def _attached(paths: Sequence[str]) -> list[Part]:
    """Read the files that --file names. Raises ConfigError."""
    try:
        return [part_of(path) for path in paths]
    except OSError as error:
        raise ConfigError(f"--file {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--file: {error}") from None


def serving(config: ServerConfig, model: str, key: str | None) -> str | None:
    """Return the URL of the server at the address in `config` if that server serves `model`, else None."""
    import http.client

    from server.cli.health import ask
    from server.process.terminal import url_of

    try:
        status, body = ask(config, "/v1/models", key, ASK_LIMIT_S)
        names = [entry["id"] for entry in json.loads(body)["data"]] if status == 200 else []
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    if model not in names:
        return None
    return url_of(config.uds or (config.host, config.listen_port), secured=config.ssl_certfile is not None)


def read_value(name: str, text: str) -> dict[str, Any]:
    """Return a numeric field of a request as `{name: value}`. An empty `text` means None (unset). Raises ConfigError."""
    name = name.replace("-", "_")
    if name not in NUMBERS:
        raise ConfigError(f"unknown setting {name}; available: {', '.join(NUMBERS)}")
    try:
        value = json.loads(text or "null")
    except ValueError:
        value = text
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise ConfigError(f"{name} must be a number, not {text}")
    return {name: value}


@contextlib.contextmanager
def answering(runner: asyncio.Runner, arguments: ChatArguments) -> Iterator[Answerer | None]:
    """Yield the source of answers. If it is not available, print the reason and yield None."""
    from server.cli.answerers import AnswerFailed, Endpoint

    answerer: Answerer
    try:
        if arguments.url is not None:
            answerer = endpoint = Endpoint(arguments.url, arguments.model, arguments.api_key)
            runner.run(endpoint.find_model())
        else:
            assert arguments.config is not None
            answerer = _local(arguments.config)
    except (AnswerFailed, ValueError) as error:
        print(f"oneloop: {error}", file=sys.stderr)
        yield None
        return
    try:
        yield answerer
    finally:
        runner.run(answerer.close())


def _local(config: ServerConfig) -> Answerer:
    """Load the model into this process and return a source of answers that uses it. Raises ValueError if it cannot be loaded."""
    from server.cli.local_model import LocalModel
    from server.llm.llm import LLM
    from server.models.lifecycle import LoadError

    try:
        return LocalModel(LLM.of(config), config.served_names[0])
    except LoadError as error:
        raise ValueError(str(error)) from error
