"""The packages of a wheel: copies of the checkout's, all inside of `oneloop`.

In a checkout the packages are called as their folders are: `server`, `runtime`, `ops`, `loadtests`. In site-packages such names
would meet a user's own: a `server.py` of theirs would be imported in place of ours, or ours in place of theirs. So a wheel holds
copies as `oneloop.server` and so on, whose import statements name them so; nothing is renamed when a program runs. Beside
`oneloop` there are the compiled modules `oneloop_native` and `oneloop_text`, and a package `server` of two lines, for
`python -m server`."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGES = ("server", "runtime", "ops", "loadtests")

_NAMES = "|".join(PACKAGES)
_FROM = re.compile(rf"^([ \t]*from )((?:{_NAMES})(?:\.\w+)* import )", re.MULTILINE)
_IMPORT = re.compile(rf"^([ \t]*)import ({_NAMES})$", re.MULTILINE)
# What is not copied but made: `python -m oneloop`, `python -m server`, and what `server` was called before there was `oneloop`.
_MADE = {
    "oneloop/__main__.py": "import sys\n\nfrom oneloop import main\n\nsys.exit(main())\n",
    "server/__init__.py": '"""Another name of `oneloop`."""\n\nfrom oneloop.server import __getattr__, __version__\n',
    "server/__main__.py": "import sys\n\nfrom oneloop import main\n\nsys.exit(main())\n",
}


def renamed(source: str) -> str:
    """Return Python source whose imports of PACKAGES name them inside of `oneloop`."""
    return _IMPORT.sub(r"\1from oneloop import \2", _FROM.sub(r"\1oneloop.\2", source))


def write_packages(root: Path, target: Path) -> None:
    """Write the packages of the checkout `root` as a wheel has them into the folder `target`."""
    for name in PACKAGES:
        for path in sorted((root / name).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                _copy(path, target / "oneloop" / path.relative_to(root))
    _copy(root / "oneloop.py", target / "oneloop" / "__init__.py")
    for name, text in _MADE.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".py":
        target.write_text(renamed(source.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        target.write_bytes(source.read_bytes())
