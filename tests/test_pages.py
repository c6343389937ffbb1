"""What the pages of the repository say of it is there: links, files, names, commands."""

from __future__ import annotations

import ast
import dataclasses
import gc
import re
from pathlib import Path

import pytest

from loadtests.__main__ import COMMANDS
from loadtests.results import RECORDS, latest, read_records
from loadtests.targets import LARGE, ROWS, SMALL
from server.config import command_line
from server.config.server_config import ServerConfig
from server.ray.options import RayOptions
from tests import reliability

ROOT = Path(__file__).parent.parent
FOLDERS = ("server", "runtime", "ops", "csrc", "tests", "loadtests", ".github")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
NOW = [page for page in PAGES if page.name not in ("CHANGELOG.md", "RESULTS.md", "CPU.md")]  # the others tell what was
SUFFIXES = "py|md|json|jsonl|toml|html|cu|cuh|cpp|h|inl"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
every_page_of_now = pytest.mark.parametrize("page", NOW, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@every_page
def test_every_link_within_the_repository_leads_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(page)):
        if "://" not in target:
            found = (page.parent / target).resolve()
            assert found.is_relative_to(ROOT), f"{target} is outside"
            assert found.exists(), f"{target} is not there"


@every_page
def test_no_page_needs_what_is_outside_the_repository(page: Path):
    assert not re.findall(r"\.\./shared\S*|/work/\S*|house_review\S*", page.read_text())


@every_page_of_now
def test_files_that_a_page_names_are_there(page: Path):
    """From its folder or from the root; in a list of files, by their names alone."""
    named = re.findall(rf"`([\w.*-][\w.*/-]*\.(?:{SUFFIXES})|[\w.-]+/[\w./-]*/)`", prose(page))
    places = (page.parent, ROOT)
    lost = [
        name for name in named if not any(any(place.glob(name)) or any(place.glob(f"**/{name}")) for place in places)
    ]
    assert not lost


def attributes() -> dict[str, set[str]]:
    """What every class of the tree has, those of the same name together."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    own = found.setdefault(node.name, set())
                    for part in ast.walk(node):
                        match part:
                            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                                own.add(name)
                            case (
                                ast.Attribute(value=ast.Name(id="self"), attr=name)
                                | ast.AnnAssign(target=ast.Name(id=name))
                            ):
                                own.add(name)
                            case ast.Assign(targets=[ast.Name(id=name)]):
                                own.add(name)
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    # A collection in the midst of `ast.parse` may end in a warning whose traceback is parsed as well: CPython 3.11 cannot bear
    # that (gh-106905).
    gc.collect()
    gc.disable()
    try:
        return attributes()
    finally:
        gc.enable()


@every_page_of_now
def test_classes_and_their_methods_that_a_page_names_are_there(page: Path, known: dict[str, set[str]]):
    names = re.findall(r"(?<![\w./])([A-Z]\w*[a-z]\w*)\.([a-z_]\w+)", page.read_text())
    assert not [f"{owner}.{name}" for owner, name in names if name not in known.get(owner, ())]


def test_commands_that_pages_show_exist():
    program = r"(?:python -m )?(oneloop|server|loadtests) ([a-z]\w*)"
    shown = {each for page in NOW for each in re.findall(rf"(?:^|`){program}", page.read_text(), re.MULTILINE)}
    assert {command for program, command in shown if program in ("server", "oneloop")} <= set(command_line.COMMANDS)
    assert {command for program, command in shown if program == "loadtests"} <= set(COMMANDS)
    assert shown


def test_options_that_pages_of_the_server_name_exist():
    fields = dataclasses.fields(ServerConfig)
    words = {field.metadata["name"] or field.name for field in fields}
    options = {f"--{word.replace('_', '-')}" for word in words}.union(*(field.metadata["aliases"] for field in fields))
    options |= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(RayOptions)}
    pages = [page for page in NOW if page.relative_to(ROOT).parts[0] in ("server", "runtime")]
    shown = {each for page in pages for each in re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text())}
    assert shown - options == {"--help", "--resume", "--scheme", "--calibrate", "--calibration-tokens"}


@pytest.mark.parametrize("entry", [entry for entries in reliability.AREAS.values() for entry in entries])
def test_what_shows_that_the_server_is_reliable_is_there(entry: str):
    assert reliability.tests_of(entry)


def test_the_readme_stays_what_a_newcomer_reads_on_day_one():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_benchmarks_of_the_readme_are_those_of_the_records():
    records = read_records([RECORDS])
    cells = [(row, model) for row in ROWS for model in (SMALL, LARGE)]
    measured = {(model, row.title): (row, latest(records, model)[0].get(row.key)) for row, model in cells}
    rows = re.findall(r"^\| (\S+) \| (.+?) \| (\S+) \| (\S+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    shown = [row for row in rows if row[0] in (SMALL, LARGE)]
    assert shown
    for model, figure, ours, theirs in shown:
        row, value = measured[model, figure]
        assert [ours, theirs] == [row.shown(value), row.shown(row.vllm[model])], f"{model}, {figure}"
