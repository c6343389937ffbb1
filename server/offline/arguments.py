"""Arguments of `oneloop chat` and `oneloop complete`, and who shall answer.

What is not theirs is an option of the engine, read as `oneloop serve` reads it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.config.command_line import CommandParser
from server.config.parse import parse
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError

if TYPE_CHECKING:
    from server.offline.answerers import Answerer

KEY_VARIABLES = ("ONELOOP_API_KEY", "OPENAI_API_KEY")  # in this order
NUMBER_FLAGS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
NUMBERS = (*NUMBER_FLAGS, "presence_penalty", "frequency_penalty", "repetition_penalty")  # what /set knows
DESCRIPTIONS = {
    "chat": "Talk to a model at the terminal. A question on the command line, or by a pipe, is answered once.",
    "complete": "Go on with a text, given on the command line or by a pipe.",
}


@dataclass(frozen=True, slots=True)
class Arguments:
    """`url` None: a model in this process, by `config`. `fields`: of every request, by OpenAI's names."""

    prompt: str
    system: str
    fields: Mapping[str, Any]
    url: str | None
    api_key: str | None
    model: str | None
    config: ServerConfig | None


def arguments_or_exit_code(command: str, argv: Sequence[str]) -> Arguments | int:
    """The arguments of this process; its exit code where there is nothing to answer: 0 after help, 2 for options that cannot be
    honoured, which has been said then."""
    try:
        arguments = read_arguments(command, argv, os.environ)
    except ConfigError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 2
    return 0 if arguments is None else arguments


def read_arguments(command: str, argv: Sequence[str], environment: Mapping[str, str]) -> Arguments | None:
    """None where only help was asked for, which has been printed then.

    Raises ConfigError."""
    parser = CommandParser(
        prog=f"oneloop {command}", usage=f"oneloop {command} [PROMPT] [options]", description=DESCRIPTIONS[command],
        allow_abbrev=False, add_help=False,
        epilog="Options of `oneloop serve` for model and engine are options here too, where no --url is given.",
    )  # fmt: skip
    add = parser.add_argument
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
        add("--system", default="", metavar="TEXT", help="how the model shall be")
    for name in NUMBER_FLAGS:
        add("--" + name.replace("_", "-"), metavar="N", help=argparse.SUPPRESS if name in ("top_k", "min_p") else None)
    add("-h", "--help", action="store_true", help="show this and exit")
    # What is not known here is the engine's, with its values; so a prompt comes first.
    num_words = next((number for number, word in enumerate(argv) if word.startswith("-")), len(argv))
    given, rest = parser.parse_known_args(argv[num_words:])
    if given.help:
        parser.print_help()
        return None
    fields: dict[str, Any] = {}
    for name in NUMBER_FLAGS:
        if (value := getattr(given, name)) is not None:
            fields |= read_value(name, value)
    prompt, system = " ".join(argv[:num_words]), getattr(given, "system", "")
    if given.url is not None:
        if rest:
            raise ConfigError(f"{rest[0]} says nothing to an endpoint")
        key = given.api_key or next((environment[name] for name in KEY_VARIABLES if environment.get(name)), None)
        return Arguments(prompt, system, fields, given.url, key, given.model, None)
    model = [] if given.model is None else ["--model", given.model]
    return Arguments(
        prompt, system, fields, None, None, None, parse([*model, *rest], environment).of_one_model("what is asked here")
    )


def read_value(name: str, text: str) -> dict[str, Any]:
    """`{name: value}` of a number that a request can have; a value of nothing takes it out again.

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
    """Who answers, as long as the block lasts; None where nobody can, which has been said then."""
    from server.loaded.lifecycle import LoadError
    from server.offline.answerers import AnswerFailed, Endpoint, LocalModel
    from server.offline.llm import LLM

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
