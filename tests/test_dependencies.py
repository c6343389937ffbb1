"""requirements/constraints.txt names a release of everything that pyproject.toml asks for, within its range."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
OF_THE_MACHINE = {"torch", "triton"}  # which build of them fits is not for us to say


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def releases(file: str = "constraints.txt") -> dict[str, Version]:
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {plain(name): Version(version) for name, version in pairs}


def test_every_dependency_has_a_release_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    known = releases()
    lost = []
    for requirement in map(Requirement, asked):
        if plain(requirement.name) in OF_THE_MACHINE:
            continue
        release = known.get(plain(requirement.name))
        if release is None or release not in requirement.specifier:
            lost.append(f"{requirement} (constraints.txt: {release})")
    assert not lost, "see CONTRIBUTING.md"


def test_the_machines_builds_are_not_constrained():
    assert not OF_THE_MACHINE & set(releases())


def test_ci_and_docker_install_these_releases():
    for file in (".ci/run", "Dockerfile"):
        assert re.search(r"PIP_CONSTRAINT=\S*/requirements/constraints\.txt", (ROOT / file).read_text()), file


def test_every_path_of_the_tree_that_a_script_names_is_there():
    for file in (".ci/run", ".ci/check", ".ci/sanitize", ".ci/constraints", "Dockerfile"):
        text = (ROOT / file).read_text()
        named = re.findall(
            r"(?<![\w./-])(?:\$top/)?((?:csrc|loadtests|ops|requirements|runtime|server|tests)/[\w./-]+)", text
        )
        assert not [path for path in named if not any(ROOT.glob(f"{path}*"))], file


def test_ci_runs_the_server_on_the_release_of_ray_that_the_extra_gets():
    assert releases("ray.txt")["ray"] == releases()["ray"]
    run = (ROOT / ".ci/run").read_text()
    assert re.search(r"pip install .*--no-deps .*-r \S*/requirements/ray\.txt", run)
    assert re.search(r"outside .*tests/e2e/nightly/ray\S*$", run, re.MULTILINE)


def test_ci_runs_every_client_that_has_a_test_at_a_release():
    """Without them tests/e2e/nightly/clients collects nothing, which pytest ends with an error."""
    tested = {plain(path.stem.removeprefix("test_")) for path in (ROOT / "tests/e2e/nightly/clients").glob("test_*.py")}
    assert tested
    packages = {"langchain": "langchain-openai", "llama-index": "llama-index-embeddings-openai"}
    assert {packages.get(name, name) for name in tested} <= releases("clients.txt").keys()
    run = (ROOT / ".ci/run").read_text()
    assert re.search(r"pip install .*--no-deps .*-r \S*/requirements/clients\.txt", run)
    assert re.search(r"outside .*tests/e2e/nightly/clients\S* ", run, re.MULTILINE)
