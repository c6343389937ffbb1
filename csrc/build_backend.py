"""Build backend: scikit-build-core with all packages inside of `oneloop`.

Without a compiler the wheel has no compiled modules, and torch computes everything on the CPU."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from scikit_build_core import build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
from wheel_packages import PACKAGES, write_packages

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, list[str] | str] | None
CORE_MINUTES = 15  # compile time in .ci/run on two cores
WITHOUT_KERNELS = """
oneloop is installed WITHOUT its compiled CPU kernels: building them failed (is there a C++20 compiler?).
It works all the same, slower on the CPU: torch computes everything. For the kernels, install a compiler
(Debian: apt-get install g++) and run pip install again; pip install -v shows what went wrong.
"""


@contextmanager
def _packages(settings: Settings) -> Iterator[dict[str, list[str] | str]]:
    """Yield settings for scikit-build-core with the packages, which exist within the context."""
    with tempfile.TemporaryDirectory() as folder:
        write_packages(Path.cwd(), Path(folder))
        yield {**(settings or {}), "wheel.packages": [f"{folder}/oneloop", f"{folder}/server"]}


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Build the wheel and return its name."""
    with _packages(config_settings) as settings:
        if settings.get("wheel.cmake") == "false":
            return build.build_wheel(wheel_directory, settings, metadata_directory)
        minutes = max(1, round(CORE_MINUTES / (os.cpu_count() or 1)))
        _tell(f"oneloop: compiling the CPU kernels, about {minutes} minutes on {os.cpu_count()} cores\n")
        try:
            return build.build_wheel(wheel_directory, settings, metadata_directory)
        except SystemExit:  # CMake or the compiler failed, and has printed the reason
            # Without the prepared metadata, whose tag is that of a wheel with kernels.
            made = build.build_wheel(wheel_directory, {**settings, "wheel.cmake": "false"})
            _tell(WITHOUT_KERNELS)
            return made


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """Write the metadata without compiling anything, and return its folder."""
    return build.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build an installation that runs from the checkout, under the checkout's names. Return the wheel's name."""
    settings = {**(config_settings or {}), "wheel.packages": [*PACKAGES, "oneloop.py"]}
    return build.build_editable(wheel_directory, settings, metadata_directory)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    """Write the metadata without compiling anything, and return its folder."""
    return build.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def _tell(text: str) -> None:
    """Print a message to the terminal about slow or failed parts: pip hides a build's output unless it runs with -v."""
    print(text, flush=True)
    if not sys.stdout.isatty():
        with suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\n{text}")
