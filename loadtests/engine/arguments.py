"""Options of the engine benchmark: its own, and every field of EngineConfig with other defaults."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from loadtests.engine import __doc__ as about
from runtime.config import EngineConfig
from runtime.speculate.config import SpeculativeConfig

DEFAULT_MODEL_LEN, DEFAULT_SEQS = 16_384, 512  # as vLLM was measured


def pair(text: str) -> tuple[int, int]:
    """Parse text such as `8x8192` into the number of requests and the tokens of each."""
    requests, _, tokens = text.partition("x")
    return int(requests), int(tokens)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.engine", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="a folder with a config.json; weights are drawn at random")
    add("--batch", type=int, nargs="*", default=[], metavar="B", help="decode step time at these batch sizes")
    add(
        "--steps",
        type=int,
        nargs="*",
        default=[],
        metavar="B",
        help="step time, and tokens a second, at these batch sizes",
    )
    add("--prefill", type=pair, nargs="*", default=[], metavar="AxT", help="prefill rates, such as 8x8192")
    add("--ttft", type=int, nargs="*", default=[], metavar="T", help="time to first token of one prompt of T ids")
    add(
        "--pool",
        type=pair,
        nargs="*",
        default=[],
        metavar="AxT",
        help="embed A texts of T ids, some at a time as the server does",
    )
    add("--throughput", action="store_true", help="the workload of many requests of mixed lengths")
    add(
        "--profile",
        type=Path,
        metavar="DIR",
        help="folder for a table of the kernels of decode steps, at --profile-batch",
    )
    add("--profile-batch", type=int, nargs="*", default=[1], metavar="B")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="decode, steps: length of each prompt (512)")
    add(
        "--decode-tokens",
        type=int,
        default=128,
        metavar="N",
        help="decode: steps that are timed; steps: tokens of a row (128)",
    )
    add("--repeat", type=int, default=3, metavar="N", help="decode, steps: the median of this many (3)")
    add("--throughput-requests", type=int, default=256, metavar="N")
    add("--throughput-lengths", type=int, nargs=2, default=[100, 1024], metavar=("MIN", "MAX"))
    add("--verbose", action="store_true", help="the engine's log on standard error")
    engine = parser.add_argument_group("engine (runtime.config.EngineConfig)")
    hints = typing.get_type_hints(EngineConfig)
    for option in fields(EngineConfig):
        kinds = [kind for kind in (*typing.get_args(hints[option.name]), hints[option.name]) if kind is not type(None)]
        flag = "--" + option.name.replace("_", "-")
        if hints[option.name] is bool:
            engine.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
        elif option.metadata.get("parse") == SpeculativeConfig.parse:
            engine.add_argument(flag, type=SpeculativeConfig.parse, metavar="JSON", default=argparse.SUPPRESS)
        elif isinstance(kinds[0], str):  # one of a Literal's
            choices = [kind for kind in kinds if isinstance(kind, str)]
            engine.add_argument(flag, choices=choices, default=argparse.SUPPRESS)
        elif kinds[0] in (int, float, str) and option.default is not MISSING:
            engine.add_argument(flag, type=kinds[0], default=argparse.SUPPRESS)
    return parser


def engine_config(given: Mapping[str, Any], model_config: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's options: `given`, else the defaults of the benchmark. These disable the prefix cache, use vLLM's
    lengths and rows, and compute all prompts before decodes. Otherwise the time of a decode would include prompts."""
    explicit = {option.name: given[option.name] for option in fields(EngineConfig) if option.name in given}
    longest = int(model_config.get("max_position_embeddings", DEFAULT_MODEL_LEN))
    defaults = EngineConfig(
        load_format="dummy", enable_prefix_caching=False, max_model_len=min(DEFAULT_MODEL_LEN, longest),
        max_num_seqs=DEFAULT_SEQS, max_num_mixed_tokens=1 << 20, max_queue=1 << 16, seed=0,
    )  # fmt: skip
    return replace(defaults, **explicit)
