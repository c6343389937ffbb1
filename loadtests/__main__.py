"""Command line of the load tests: `python -m loadtests COMMAND`, also `oneloop bench COMMAND`. A command is a module with
SUMMARY, `add_arguments` and `main`."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = (
    "serve",
    "sweep",
    "plot",
    "victim",
    "idle",
    "swaps",
    "steps",
    "drafts",
    "embed",
    "speech",
    "gpu",
    "tiers",
    "compare",
    "table",
    "results",
    "soak",
)


def main(argv: list[str] | None = None, prog: str = "python -m loadtests") -> int:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Load tests for any OpenAI-compatible server. The last line printed is always JSON.",
        epilog="COMMAND --help lists the options; loadtests/README.md explains the figures.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"{__package__}.{name}")
        command = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    args = parser.parse_args(argv)
    try:
        return int(args.main(args))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
