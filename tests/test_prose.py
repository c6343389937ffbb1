"""Sentences that cannot be read alone are counted, and their number may only fall: `python -m tests.test_prose` lists them.

Rules: a docstring begins with a verb or with the thing's noun; a help text has sentences of at most 25 words; a paragraph of a
page has at most five lines; messages use the field's words."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.config.server_config import ServerConfig

ROOT = Path(__file__).parent.parent
# How many there are. Lower a number when you have rewritten some; never raise one.
LIMITS = {"docstrings": 0, "long help": 0, "private words": 0, "private docstrings": 25, "long paragraphs": 0}

RELATIVES = (
    "what|who|whose|whom|those|that|of|behind|beside|by|whether|where|which|how|when|as|in|on|at|for|from|to|with|without|not|only"
    "|so|none|here|there|about|since|until|while|after|before|if|it|this|these|they|its|their"
)
HEADLESS = re.compile(rf"(?:(?:{RELATIVES})\b|[`({{\[])", re.IGNORECASE)
PRIVATE = re.compile(
    r"\b(whoever|nobody|somebody|anybody|everybody|anew|so many|told|tells|hears?|lately|takes? turns|makes? room|gives? way"
    r"|pictures?|sounds?)\b",
    re.IGNORECASE,
)
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


@functools.cache
def product() -> dict[str, ast.Module]:
    folders = [ROOT / name for name in ("server", "runtime", "ops", "loadtests")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def headless_docstrings() -> list[str]:
    found: list[str] = []
    for name, module in product().items():
        for node in ast.walk(module):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text is not None and HEADLESS.match(text):
                found.append(f"{name}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    return found


def helps() -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(ServerConfig):
        yield field.name, str(field.metadata["text"])


def long_help() -> list[str]:
    sentences = [(name, each) for name, text in helps() for each in re.split(r"(?<=[.;:])\s+", text)]
    return [f"--{name}: {each}" for name, each in sentences if len(each.split()) > 25]


def messages() -> Iterator[tuple[str, str]]:
    """Texts that users see: help, and what is raised or logged."""
    yield from helps()
    for name, module in product().items():
        for node in ast.walk(module):
            raised = node.exc if isinstance(node, ast.Raise) else None
            logged = isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("log.", "logger."))
            if raised is not None or logged:
                for part in ast.walk(raised or node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield f"{name}:{part.lineno}", part.value


def private_words() -> list[str]:
    return [f"{where}: {text}" for where, text in messages() if PRIVATE.search(text)]


def private_docstrings() -> list[str]:
    found: list[str] = []
    for name, module in product().items():
        for node in ast.walk(module):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text is not None and PRIVATE.search(text):
                found.append(f"{name}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    return found


def long_paragraphs() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found: list[str] = []
    for page in listed.split():
        prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        for paragraph in prose.split("\n\n"):
            lines = paragraph.strip().splitlines()
            if len(lines) > 5 and not any(line.lstrip().startswith(("|", "-", "*", "#", "1.", "<")) for line in lines):
                found.append(f"{page}: {lines[0]}")
    return found


COUNTED = {
    "docstrings": headless_docstrings,
    "long help": long_help,
    "private words": private_words,
    "private docstrings": private_docstrings,
    "long paragraphs": long_paragraphs,
}


@pytest.mark.parametrize("kind", COUNTED)
def test_sentences_that_cannot_be_read_alone_become_fewer(kind):
    found = COUNTED[kind]()
    assert len(found) <= LIMITS[kind], f"{len(found)} instead of {LIMITS[kind]}: see `python -m tests.test_prose`"


if __name__ == "__main__":
    for kind, count in COUNTED.items():
        found = count()
        print(f"{kind}: {len(found)} of at most {LIMITS[kind]}", *found, sep="\n  ")
