"""oneloop_text, the compiled way from ids to text and to a connection, if this installation has it.

It is missing where no C++ compiler was at hand when oneloop was installed; Python does everything then, slower."""

from __future__ import annotations

from typing import Any

try:
    import oneloop_text

    module: Any = oneloop_text
except ImportError:
    module = None
