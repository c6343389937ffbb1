"""EngineArgs: the options of an LLM as an object or from a command line, as in vLLM."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from server.config import vllm_keywords
from server.config.command_line import add_options
from server.config.option import did_you_mean
from server.config.parse import from_keywords, keyword_options
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError, flag_of
from server.media.limits import UNBOUNDED_GB

UNBOUNDED = 2**31 - 1  # the queue's limit: `Core` bounds what is with the engine
_NAMES = dict.fromkeys(("model", *keyword_options(), *vllm_keywords.NAMES))
_Fields: Any = dataclasses.make_dataclass("_Fields", [(name, Any, None) for name in _NAMES])


def program_config(model: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> ServerConfig:
    """Return the configuration for the keyword arguments of `LLM`. Raises ValueError."""
    path = None if model is None else os.fspath(model)
    try:
        return unbounded(from_keywords({"enable_mm_embeds": True, **options, "model": path}))
    except ConfigError as error:
        raise ValueError(str(error)) from None


def unbounded(config: ServerConfig) -> ServerConfig:
    """Return `config` without the limits that protect a server from its clients."""
    return dataclasses.replace(config, max_queue=UNBOUNDED, max_media_memory_gb=UNBOUNDED_GB)


class EngineArgs(_Fields):  # type: ignore[misc]  # a dataclass, for `dataclasses.asdict`
    """Options of an LLM: `LLM(**dataclasses.asdict(EngineArgs(…)))` equals `LLM.from_engine_args(EngineArgs(…))`. None means the
    default value. Raises ValueError for an unknown option."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        for name in options:
            if name not in _NAMES:
                raise ValueError(f"unknown option {name!r}{did_you_mean(name, _NAMES)}")
        super().__init__(model=model, **options)

    def given(self) -> dict[str, Any]:
        """Return the options that are set (not None), by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the flags of these options to `parser`, and return it. The default value of each flag is None."""
        parser.add_argument("--model", help="folder in Hugging Face format, .gguf file, hub id or built-in name")
        options = keyword_options()
        add_options(parser, options, shown=options)
        for name in _NAMES:
            if name not in options:
                parser.add_argument(flag_of(name), nargs="?", const=True, help=argparse.SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Create EngineArgs from parsed arguments. Arguments that are not options are ignored."""
        return cls(**{name: value for name, value in vars(args).items() if name in _NAMES})


AsyncEngineArgs = EngineArgs


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Argument parser that also accepts underscores in flags: `--max_model_len`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(word) for word in words], namespace)


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word
