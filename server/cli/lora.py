"""Command `oneloop lora inspect FOLDER`: prints the contents of an adapter, and whether a model can serve it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.config.command_line import CommandParser

Inspect = Callable[[str, str | None, int], Mapping[str, Any]]


def main(argv: Sequence[str], inspect: Inspect) -> int:
    """Print the contents of an adapter. Return the exit code: 0, or 1 if it cannot be read or served. `inspect`: reads the
    adapter; raises ValueError. Raises ConfigError for unknown options."""
    args = _parser().parse_args(argv)
    try:
        found = inspect(args.folder, args.model, args.max_lora_rank)
    except ValueError as error:
        print(f"oneloop lora: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found) if args.json else report(found))
    return int(found["refusal"] is not None)


def _parser() -> CommandParser:
    parser = CommandParser(prog="oneloop lora", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser(
        "inspect", help="print the contents of an adapter's folder", allow_abbrev=False
    ).add_argument
    add("folder", help="adapter folder with adapter_config.json and adapter_model.safetensors")
    add("--model", metavar="MODEL", help="base model to check against: a folder, .gguf file, hub id or built-in alias")
    add("--max-lora-rank", type=int, default=16, metavar="N", help="the server's --max-lora-rank (default: 16)")
    add("--json", action=argparse.BooleanOptionalAction, default=False, help="print JSON")
    return parser


def report(found: Mapping[str, Any]) -> str:
    lines = [f"{found['path']}: {found['num_parameters']:,} numbers in {', '.join(found['dtypes'])}"]
    if "rank" in found:
        scale = "alpha / sqrt(rank)" if found["rslora"] else "alpha / rank"
        lines.append(f"  rank {found['rank']}, alpha {found['alpha']:g}, scaled by {scale}")
        for what in ("rank", "alpha"):
            lines += [f"  {what} {value:g} for {name}" for name, value in found[f"{what}_pattern"].items()]
        targets = ", ".join(f"{count} {kind}" for kind, count in found.get("targets", {}).items())
        lines.append(f"  adapts {targets}" if targets else "  adapts nothing")
        lines.append(f"  trained on {found['base'] or 'a model that it does not name'}")
    if "fits" in found:
        lines.append(f"  fits {found['fits']}: {found['num_layers_adapted']} layers")
    if found["refusal"] is not None:
        lines.append(f"  cannot be served: {found['refusal']}")
    return "\n".join(lines)
