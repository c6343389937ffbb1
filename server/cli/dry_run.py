"""Option `--dry-run`: prints the resolved options as a table, and as JSON in the last line. Nothing is served."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from server.config.server_config import ServerConfig
from server.models.lifecycle import LoadError, Report
from server.process.terminal import StartupDisplay, size_of

BYTES = "_bytes"


def main(config: ServerConfig, plan: Callable[[ServerConfig, Report], Mapping[str, Any]]) -> int:
    """Print the plan for `config`. Return 0, or 1 if the model cannot be served. `plan`: the function
    `server.process.plan.dry_run`."""
    display = StartupDisplay(sys.stderr)
    try:
        found = plan(config, display.report)
    except LoadError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 1
    finally:
        display.finish()
    kernels = {"kernels"} if config.log_level != "debug" else set()
    print(table({name: value for name, value in found.items() if name not in kernels}))
    print(json.dumps(found))
    return 0


def table(found: Mapping[str, Any]) -> str:
    """Return a table with a line for each value, and for each item of a list. None values are left out."""
    lines = []
    for name, value in found.items():
        title = name.removesuffix(BYTES).replace("_", " ")
        for number, shown in enumerate(value if isinstance(value, list | tuple) else [value]):
            if shown is not None:
                text = size_of(shown) if name.endswith(BYTES) else f"{shown:,}" if type(shown) is int else str(shown)
                lines.append(f"  {'' if number else title:<24}{text}")
    return "\n".join(lines)
