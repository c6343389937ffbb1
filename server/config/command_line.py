"""Command line: the commands, and the parser of their options."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from server.config import __version__
from server.config.option import Option, did_you_mean, options_by_name
from server.config.server_options import ConfigError, flag_of

COMMANDS: Mapping[str, tuple[str, str]] = {  # arguments, and what the command does
    "run": ("NAME [PROMPT]", "chat with a model by name, or answer a prompt"),
    "pull": ("NAME…", "download models"),
    "list": ("", "list the models on this disk"),
    "show": ("NAME", "show a model's size, licence, formats and files"),
    "rm": ("NAME…", "delete models from this disk"),
    "models": ("[--fit]", "list the models with short names, or those that fit this machine"),
    "serve": ("[MODEL]", "serve a model over HTTP; the command where none is given"),
    "ps": ("", "list the running servers"),
    "stop": ("MODEL|PORT|PID", "stop a running server"),
    "launch": ("CLIENT", "start codex, claude, opencode, aider or openwebui with a running server"),
    "chat": ("[PROMPT]", "chat with --model, or with the server at --url"),
    "complete": ("[PROMPT]", "continue a text"),
    "transcribe": ("FILE…", "transcribe audio files"),
    "batch": ("IN OUT", "answer a file of requests"),
    "health": ("[live|ready|generate]", "check a server"),
    "bench": ("COMMAND", "measure a server"),
    "doctor": ("", "check hardware and dependencies"),
    "quantize": ("MODEL OUT", "write a quantised copy of a model"),
    "lora": ("inspect FOLDER", "describe a LoRA adapter"),
    "ray": ("", "serve on Ray, in several processes"),
    "completion": ("bash|zsh|fish", "print a script that completes commands and options"),
}


def overview() -> str:
    """Return the text that `oneloop --help` prints: the commands, and hints to the help of options."""
    lines = [f"  {f'{name} {words}':<32}{text}".rstrip() for name, (words, text) in COMMANDS.items()]
    return "\n".join([
        f"oneloop {__version__}: serve language models, or chat with them", "", "usage: oneloop COMMAND [options]", "",
        *lines, "",
        "oneloop COMMAND --help describes a command. oneloop serve --help lists the most used options,",
        "--help all lists every option, --help GROUP the options of a group: " + ", ".join(_groups(options_by_name())) + ".",
    ])  # fmt: skip


def command_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command, by default `serve`, and its arguments. A model after `serve` becomes --model. Raises ConfigError."""
    if [*argv] in (["--help"], ["-h"], ["help"]):
        return "help", []
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
                f"a model is given as {model} and by --model; to serve several models, use --model {model} --model …"
            )
        rest = ["--model", model, *rest]
    return command, rest


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises ConfigError instead of exiting."""

    secret_flags: Collection[str] = ()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message[:1].lower() + message[1:])

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the values of arguments and options by name, in any order. Raises ConfigError for unknown arguments."""
        given, unknown = self.parse_known_intermixed_args(argv)
        if not unknown:
            return vars(given)
        word = unknown[0].partition("=")[0]
        if word.startswith("-"):
            raise ConfigError(f"unknown option {word}{did_you_mean(word, self._option_string_actions, '--')}")
        if any(arg.partition("=")[0] in self.secret_flags for arg in argv):
            raise ConfigError("unexpected argument, not shown because it may be a key; repeat the flag for each key")
        raise ConfigError(
            f"unexpected argument {word!r}; the model follows the command (oneloop serve MODEL) or --model, and options start "
            "with --"
        )


# What most people use, as --help lists it; `--help all` lists every option.
COMMON = frozenset({
    "model", "served_model_name", "tokenizer", "chat_template", "tool_parser", "reasoning_parser", "embedding_model", "runner",
    "lora_modules", "max_loaded_models", "dtype", "quantization", "device", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_itl", "target_ttft",
    "gpu_memory_utilization", "kv_cache_memory", "kv_cache_dtype", "enable_prefix_caching", "speculative_method",
    "speculative_model", "threads", "seed", "limit_mm_per_prompt", "host", "port", "uds", "ssl_certfile", "ssl_keyfile",
    "api_key", "admin_api_key", "cors_origin", "max_queue", "dry_run", "config", "log_level",
})  # fmt: skip


class _Help(argparse.Action):
    """Action of --help: prints the most used options, all options (`all`), or the options of a group."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        options = options_by_name()
        shown: Collection[str] = COMMON
        if values == "all":
            shown = options
        elif values is not None:
            shown = {
                name for name, opt in options.items() if opt.metadata["group"].split(",")[0].lower() == values.lower()
            }
        if not shown:
            raise ConfigError(f"--help {values}: there is no such group; use all, {', '.join(_groups(options))}")
        option_parser(options, shown, in_full=values is not None).print_help()
        parser.exit()


def _groups(options: Mapping[str, Option]) -> list[str]:
    """Return the names of the groups of options for --help: the first word of each group's title."""
    return list(dict.fromkeys(opt.metadata["group"].split(",")[0].lower() for opt in options.values()))


def add_options(
    parser: argparse.ArgumentParser, options: Mapping[str, Option], shown: Collection[str] = (), *, in_full: bool = True
) -> None:
    """Add `options` to `parser`, except flags that `parser` already has. `shown`: names of the options that --help lists.
    `in_full`: help texts contain variable and default; False shows one line for each option."""
    if isinstance(parser, CommandParser):
        parser.secret_flags = {flag_of(opt.name) for opt in options.values() if opt.metadata["secret"]}
    groups: dict[str, Any] = {}
    for opt in options.values():
        flag, title = flag_of(opt.name), opt.metadata["group"]
        if flag in parser._option_string_actions:
            continue
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        text = (opt.help() if in_full else opt.brief()) if opt.name in shown else argparse.SUPPRESS
        if opt.kind is bool:
            group.add_argument(flag, dest=opt.name, action=argparse.BooleanOptionalAction, help=text)
        else:
            action = "append" if opt.kind is tuple else "store"
            how: dict[str, Any] = {"action": "extend", "nargs": "+"} if opt.metadata["several"] else {"action": action}
            group.add_argument(flag, *opt.metadata["aliases"], dest=opt.name, metavar=opt.metavar(), help=text, **how)


def option_parser(
    options: Mapping[str, Option], shown: Collection[str] = COMMON, *, in_full: bool = True
) -> CommandParser:
    """Return the parser of `oneloop serve`. `shown`, `in_full`: see `add_options`."""
    width = min(120, shutil.get_terminal_size().columns)
    parser = CommandParser(
        prog="oneloop",
        usage="oneloop serve [MODEL] [options]",
        description="Serve a language model over OpenAI's, Anthropic's and Ollama's APIs, by default SmolLM2-135M-Instruct on "
        "127.0.0.1:8000. MODEL is short for --model.",
        epilog="Every option is also an environment variable (--model is ONELOOP_MODEL) and a key of the --config file. Flags "
        "override variables, and variables override the file.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=width),
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    listed = f"list all {len(options)} options, or a group: {', '.join(_groups(options))}"
    parser.add_argument("-h", "--help", nargs="?", action=_Help, metavar="all|GROUP", help=listed)
    parser.add_argument(
        "--version",
        action="version",
        version=f"oneloop {__version__} from {Path(__file__).parents[2]}",
        help="print the version",
    )
    add_options(parser, options, shown, in_full=in_full)
    return parser
