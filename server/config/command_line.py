"""The command line: its commands, and the parser of the options behind them."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from server.config.option import Option, did_you_mean
from server.config.server_options import ConfigError, flag_of
from server.config.version import __version__

COMMANDS = (
    "serve",
    "chat",
    "complete",
    "batch",
    "bench",
    "health",
    "models",
    "lora",
    "quantize",
    "doctor",
    "completion",
    "ray",
)
USAGE = (
    "oneloop [serve [MODEL]] [options]\n       oneloop chat|complete [PROMPT] [--url URL] [options]\n"
    "       oneloop batch IN OUT [--resume] [options]\n       oneloop bench COMMAND [options]\n"
    "       oneloop health [live|ready|generate] [options]\n       oneloop models [--json]\n"
    "       oneloop lora inspect FOLDER [--model MODEL]\n"
    "       oneloop quantize MODEL OUT --scheme w4a16|fp8|w8a8 [--calibrate FILE]\n"
    "       oneloop doctor [--json] [--verbose]\n       oneloop completion bash|zsh|fish\n"
    "       oneloop ray [--replicas N] [options]"
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
            raise ConfigError(
                f"the model is named twice, as {model} and by --model; several models are --model {model} --model …"
            )
        rest = ["--model", model, *rest]
    return command, rest


class CommandParser(argparse.ArgumentParser):
    """Raises ConfigError in place of ending the process."""

    secret_flags: Collection[str] = ()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message[:1].lower() + message[1:])

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """Parse arguments and options in any order, and return what was given by name. Raises ConfigError for what is unknown."""
        given, unknown = self.parse_known_intermixed_args(argv)
        if not unknown:
            return vars(given)
        word = unknown[0].partition("=")[0]
        if word.startswith("-"):
            raise ConfigError(f"unknown option {word}{did_you_mean(word, self._option_string_actions, '--')}")
        if any(arg.partition("=")[0] in self.secret_flags for arg in argv):
            raise ConfigError("unexpected argument, not shown since it may be a key; a flag takes one key at a time")
        raise ConfigError(
            f"unexpected argument {word!r}; the model follows the command (oneloop serve MODEL) or --model, and options start "
            "with --"
        )


def add_options(parser: CommandParser, options: Mapping[str, Option], *, shown: bool = True) -> None:
    """Add the options of the server to `parser`, except flags that it has already. `shown`: whether --help lists them."""
    parser.secret_flags = {flag_of(opt.name) for opt in options.values() if opt.metadata["secret"]}
    groups: dict[str, Any] = {}
    for opt in options.values():
        flag, title = flag_of(opt.name), opt.metadata["group"]
        if flag in parser._option_string_actions:
            continue
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        text = opt.help() if shown else argparse.SUPPRESS
        if opt.kind is bool:
            group.add_argument(flag, dest=opt.name, action=argparse.BooleanOptionalAction, help=text)
        else:
            action = "append" if opt.kind is tuple else "store"
            how: dict[str, Any] = {"action": "extend", "nargs": "+"} if opt.metadata["several"] else {"action": action}
            group.add_argument(flag, *opt.metadata["aliases"], dest=opt.name, metavar=opt.metavar(), help=text, **how)


def option_parser(options: Mapping[str, Option]) -> CommandParser:
    width = min(120, shutil.get_terminal_size().columns)
    parser = CommandParser(
        prog="oneloop",
        usage=USAGE,
        description="Serve a language model over the OpenAI API. Without options: SmolLM2-135M-Instruct on 127.0.0.1:8000. "
        "MODEL is the same as --model. `chat` talks at the terminal, `complete` goes on with a text, "
        "`batch` answers a file of requests, `bench` measures any server, `models` lists what can be served, "
        "`lora inspect` looks at an adapter, `doctor` at this machine, `quantize` writes a model in fewer bits, `health` asks a "
        "server here whether it is well, `ray` serves by several processes on Ray; "
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
    add_options(parser, options)
    return parser
