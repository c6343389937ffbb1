"""The packages of a wheel: all inside of `oneloop`, so that a user's own modules may have any name."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OWN_MODULES = ("server.py", "ops.py", "runtime.py", "loadtests/__init__.py", "tests/__init__.py", "config.py")


@pytest.fixture(scope="module")
def packages():
    spec = importlib.util.spec_from_file_location("wheel_packages", ROOT / "csrc" / "wheel_packages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def installed(packages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site-packages")
    packages.write_packages(ROOT, folder)
    return folder


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_nothing_in_it_imports_a_name_that_a_user_may_have(packages, installed):
    assert sorted(path.name for path in installed.iterdir()) == ["oneloop", "server"]
    for path in installed.rglob("*.py"):
        assert not imported(path) & {*packages.PACKAGES}, path


def test_a_program_beside_modules_of_the_same_names_gets_both(installed, tmp_path):
    for name in OWN_MODULES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("WHOSE = 'mine'\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import loadtests, ops, runtime, server\n"
        "from oneloop import AsyncLLM, LLM, SamplingParams, asgi\n"
        "from oneloop.runtime.engine_options import EngineOptions\n"
        "assert {each.WHOSE for each in (loadtests, ops, runtime, server)} == {'mine'}\n"
        "assert asgi(model='smollm2-135m-instruct').llm\n"
        "print(SamplingParams(n=2))\n"
    )
    assert run(installed, tmp_path, program.name) == "SamplingParams(n=2)"
    assert str(installed / "oneloop") in run(installed, tmp_path, "-m", "oneloop", "--version")


def test_server_is_another_name_where_nobody_else_has_it(installed, tmp_path):
    assert str(installed / "oneloop") in run(installed, tmp_path, "-m", "server", "--version")
    assert (
        run(installed, tmp_path, "-c", "from server import SamplingParams as S; print(S(n=2))") == "SamplingParams(n=2)"
    )


def test_a_checkout_hidden_by_a_module_of_the_user_says_so(tmp_path):
    (tmp_path / "server.py").touch()
    (tmp_path / "program.py").write_text("import oneloop")
    ended = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert f"{tmp_path / 'server.py'} hides its folder `server`" in ended.stderr


def run(installed: Path, folder: Path, *arguments: str) -> str:
    """What a Python in `folder` prints, to which `installed` is as a site-packages."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "1000"},  # help is not wrapped
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()
