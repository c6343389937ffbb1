"""The examples of CONTRIBUTING.md work: their files are written into a copy of the tree, all into one, and the commands below them
run there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
COPIED = ("server", "runtime", "ops", "tests")


class Block(NamedTuple):
    language: str
    text: str

    @property
    def path(self) -> str:
        """What its first line says, behind the hash."""
        first = self.text.partition("\n")[0]
        assert first.startswith("# "), f"a block of {self.language} names no file: {first}"
        return first.removeprefix("# ")

    @property
    def body(self) -> str:
        return self.text.partition("\n")[2]


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def doors() -> dict[str, list[Block]]:
    """The examples by their headings."""
    titles_and_texts = re.split(r"^### (.+)\n", PAGE.partition("## Worked examples")[2], flags=re.MULTILINE)[1:]
    return dict(zip(titles_and_texts[::2], map(blocks, titles_and_texts[1::2]), strict=True))


def patched(source: str, diff: str) -> str:
    """`diff`: hunks between lines of @@, each with its kept (" "), added ("+") and removed ("-") lines."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        assert all(line[0] in " +-" or line == "\n" for line in lines), hunk
        before = "".join(line[1:] or line for line in lines if line[0] != "+")
        after = "".join(line[1:] or line for line in lines if line[0] != "-")
        assert source.count(before) == 1, f"the lines to change are not there once:\n{before}"
        source = source.replace(before, after)
    return source


# Runs the commands of the page, one process for all: each is the import of torch and transformers, and then a second or two.
RUN_ALL = """
import contextlib, json, sys
import pytest

done = {}
for title, arguments in json.load(sys.stdin).items():
    with open("output.txt", "w") as output, contextlib.redirect_stdout(output):
        code = pytest.main(["-q", "-p", "no:cacheprovider", *arguments])
    done[title] = [code, open("output.txt").read()]
json.dump(done, open("done.json", "w"))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status and output of each example's command, all of them written into one copy of what is imported and tested."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    commands = {title: write(found, tree) for title, found in doors().items()}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=json.dumps(commands), cwd=tree, env=environment, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tree / "done.json").read_text())


def write(found: list[Block], tree: Path) -> list[str]:
    """The files of one example; the arguments for pytest that show that it works."""
    command = ""
    for block in found:
        match block.language:
            case "python":
                (tree / block.path).parent.mkdir(exist_ok=True)
                assert not (tree / block.path).exists(), f"{block.path} is there already"
                (tree / block.path).write_text(block.body)
            case "diff":
                (tree / block.path).write_text(patched((tree / block.path).read_text(), block.body))
            case "":
                command = block.text
            case other:
                raise AssertionError(f"a block of {other}")
    assert found[-1].text == command, "an example ends with the command that shows it works"
    program, *arguments = shlex.split(command)
    assert program == "pytest"
    return arguments


def test_what_the_examples_show():
    assert [title.split()[1:] for title in doors()] == [
        ["model", "family"], ["op,", "or", "a", "kernel", "of", "one"], ["weight", "format"], ["GGUF", "type"], ["tool", "parser"],
        ["sampling", "field"], ["proposer", "of", "drafts"], ["endpoint"],
    ]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("title", doors())
def test_an_example_works(title: str, outcomes: dict[str, tuple[int, str]]):
    code, output = outcomes[title]
    assert code == 0, output
    assert re.match(r"[1-9]\d* passed", output.splitlines()[-1]), output  # all that it chooses


@pytest.mark.parametrize(
    "text", [block.body for found in doors().values() for block in found if block.language == "python"]
)
def test_an_example_is_written_as_the_tree_is(text: str):
    header = text.split('"""')[1]
    assert header[0].isupper()
    assert max(map(len, text.splitlines())) <= 132
    assert "\nfrom __future__ import annotations\n" in text


@pytest.mark.parametrize(
    ("diff", "result"),
    [
        (" b\n+c\n", "a\nb\nc\nd\n"),
        ("+x\n a\n@@\n-d\n", "x\na\nb\n"),
    ],
)
def test_a_hunk_changes_what_it_shows(diff, result):
    assert patched("a\nb\nd\n", diff) == result
    with pytest.raises(AssertionError, match="not there once"):
        patched("a\nb\nb\n", diff if "@@" in diff else " b\n+c\n")
