"""Packages of a wheel: copies of the checkout's packages, all inside of `oneloop`.

In a checkout the packages have the names of their folders: `server`, `runtime`, `ops`, `loadtests`. In site-packages such
names could collide with a user's own: their `server.py` would be imported instead of ours, or ours instead of theirs. So a
wheel has copies as `oneloop.server` and so on, with adapted import statements; nothing is renamed at run time. It also has
the compiled modules `oneloop_native` and `oneloop_text`, and a package `server` of two lines, for `python -m server`."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGES = ("server", "runtime", "ops", "loadtests")

_NAMES = "|".join(PACKAGES)
_FROM = re.compile(rf"^([ \t]*from )((?:{_NAMES})(?:\.\w+)* import )", re.MULTILINE)
_IMPORT = re.compile(rf"^([ \t]*)import ({_NAMES})$", re.MULTILINE)
# Generated, not copied: `python -m oneloop`, `python -m server`, and the name of `server` before `oneloop` existed.
_MADE = {
    "oneloop/__main__.py": "import sys\n\nfrom oneloop import main\n\nsys.exit(main())\n",
    "server/__init__.py": '"""Another name of `oneloop`."""\n\nfrom oneloop.server import __getattr__, __version__\n',
    "server/__main__.py": "import sys\n\nfrom oneloop import main\n\nsys.exit(main())\n",
}


def renamed(source: str) -> str:
    """Return Python source whose imports of PACKAGES refer to the packages inside of `oneloop`."""
    return _IMPORT.sub(r"\1from oneloop import \2", _FROM.sub(r"\1oneloop.\2", source))


def write_packages(root: Path, target: Path) -> None:
    """Write the packages of the checkout `root` in the wheel's form to the folder `target`."""
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
