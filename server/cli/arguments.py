"""Arguments of `oneloop chat` and `oneloop complete`, and who shall answer.

What is not theirs is an option of the engine, read as `oneloop serve` reads it."""

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

from server.config.command_line import CommandParser, add_options
from server.config.option import options_by_name
from server.config.parse import config_of
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError, flag_of
from server.http.wire_fields import DrawFields

if TYPE_CHECKING:
    from server.cli.answerers import Answerer

KEY_VARIABLES = ("ONELOOP_API_KEY", "OPENAI_API_KEY")  # in this order
NUMBERS = (*DrawFields.__struct_fields__, "max_tokens")  # what /set knows
NUMBER_FLAGS = [name for name in NUMBERS if not name.endswith("_penalty")]
SHOWN_FLAGS = ("temperature", "top_p", "max_tokens", "seed")
DESCRIPTIONS = {
    "chat": "Talk to a model at the terminal. A question on the command line, or by a pipe, is answered once.",
    "complete": "Go on with a text, given on the command line or by a pipe.",
}


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a chat. `url` None: a model in this process, by `config`. `fields`: of every request, by OpenAI's names."""

    prompt: str
    system: str
    fields: Mapping[str, Any]
    url: str | None
    api_key: str | None
    model: str | None
    config: ServerConfig | None


def arguments_or_exit_code(command: str, argv: Sequence[str], check: Callable[[ServerConfig], None]) -> Arguments | int:
    """Return the arguments of this process, or the exit code 2 for options that cannot be honoured, after printing why."""
    try:
        arguments = read_arguments(command, argv, os.environ)
        if arguments.config is not None:
            check(arguments.config)
        return arguments
    except ConfigError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 2


def read_arguments(command: str, argv: Sequence[str], environment: Mapping[str, str]) -> Arguments:
    """Read the prompt and the options, in any order. Raises ConfigError; `--help` prints and raises SystemExit(0)."""
    parser = CommandParser(
        prog=f"oneloop {command}", usage=f"oneloop {command} [PROMPT] [options]", description=DESCRIPTIONS[command],
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
        epilog="Options of `oneloop serve` for model and engine are options here too, where no --url is given.",
    )  # fmt: skip
    add = parser.add_argument
    add("prompt", nargs="*", help=argparse.SUPPRESS)
    add(
        "--model",
        metavar="MODEL",
        help="as `oneloop serve` has it; with --url the name it has there (default: the first listed)",
    )
    add(
        "--url",
        metavar="URL",
        help="an OpenAI endpoint, such as http://127.0.0.1:8000 or unix:PATH, in place of a model in this process",
    )
    add("--api-key", metavar="KEY", help=f"of the endpoint (default: {' or '.join(KEY_VARIABLES)} in the environment)")
    if command == "chat":
        add("--system", metavar="TEXT", help="system prompt, sent before the conversation")
    for name in NUMBER_FLAGS:
        add("--" + name.replace("_", "-"), metavar="N", help=None if name in SHOWN_FLAGS else argparse.SUPPRESS)
    add_options(parser, options_by_name())
    given = parser.read(argv)
    fields: dict[str, Any] = {}
    for name in NUMBER_FLAGS:
        if name in given:
            fields |= read_value(name, given.pop(name))
    prompt, system = " ".join(given.pop("prompt", ())), given.pop("system", "")
    url, api_key, model = (given.pop(name, None) for name in ("url", "api_key", "model"))
    if url is not None:
        if given:
            flag = flag_of(next(iter(given)))
            raise ConfigError(f"{flag} configures a model in this process; leave it out, since --url names a server")
        key = api_key or next((environment[name] for name in KEY_VARIABLES if environment.get(name)), None)
        return Arguments(prompt, system, fields, url, key, model, None)
    if model is not None:
        given["model"] = [model]
    config = config_of(given, environment).of_one_model("what is asked here")
    return Arguments(prompt, system, fields, None, None, None, config)


def read_value(name: str, text: str) -> dict[str, Any]:
    """Parse a numeric field of a request as `{name: value}`; an empty value removes it.

    Raises ConfigError."""
    name = name.replace("-", "_")
    if name not in NUMBERS:
        raise ConfigError(f"there is no {name}; there are {', '.join(NUMBERS)}")
    try:
        value = json.loads(text or "null")
    except ValueError:
        value = text
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise ConfigError(f"{name} is a number, not {text}")
    return {name: value}


@contextlib.contextmanager
def answering(runner: asyncio.Runner, arguments: Arguments) -> Iterator[Answerer | None]:
    """Yield the source of answers, or None after reporting that there is none."""
    from server.cli.answerers import AnswerFailed, Endpoint, LocalModel
    from server.llm.llm import LLM
    from server.models.lifecycle import LoadError

    answerer: Answerer
    try:
        if arguments.url is not None:
            answerer = endpoint = Endpoint(arguments.url, arguments.model, arguments.api_key)
            runner.run(endpoint.find_model())
        else:
            assert arguments.config is not None
            answerer = LocalModel(LLM.of(arguments.config), arguments.config.served_names[0])
    except (AnswerFailed, ValueError, LoadError) as error:
        print(f"oneloop: {error}", file=sys.stderr)
        yield None
        return
    try:
        yield answerer
    finally:
        runner.run(answerer.close())
