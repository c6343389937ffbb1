"""Python interface of oneloop: `from oneloop import LLM` (server/llm/README.md). `python -m oneloop`: the command line.

Modules are imported on first use. In a wheel, this file is `oneloop/__init__.py`, and contains the folders next to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import server

if Path(server.__file__ or "").parents[1:2] != (Path(__file__).parent,):
    raise ImportError(
        f"oneloop runs from a checkout here, and {server.__file__} hides its folder `server`. Installed by pip, oneloop imports "
        "nothing but its own packages; or run the program from another folder."
    )

if TYPE_CHECKING:
    from server import *  # noqa: F403


def main() -> int:
    """Run the command line and return the exit code."""
    from server.__main__ import main as run

    return run()


def __getattr__(name: str) -> Any:
    return getattr(server, name)


def __dir__() -> list[str]:
    return dir(server)


if __name__ == "__main__":
    sys.exit(main())
