"""What `ops` offers: the names that runtime uses and the few that tests alone may, each listed; and what importing it loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import ops

ROOT = Path(__file__).parents[2]
# Parts of `attend`, `gated_mlp` and `activated_linear`: runtime calls the whole, the tests of the parts say what the whole means.
PARTS = {"rope", "store_kv", "paged_attention", "activate", "gated_linear", "silu_mul"}


def names_used_in(folder: str) -> set[str]:
    """Every NAME of `ops.NAME` and of `from ops import NAME` in the folder's files."""
    used: set[str] = set()
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="ops"), attr=name):
                    used.add(name)
                case ast.ImportFrom(module="ops", names=names):
                    used |= {alias.name for alias in names}
    return used


def test_all_lists_what_runtime_uses_and_the_parts_that_tests_document() -> None:
    assert set(ops.__all__) == names_used_in("runtime") | PARTS


def test_every_part_has_a_test() -> None:
    assert names_used_in("tests/ops") >= PARTS


def test_names_of_ops_are_the_functions_not_the_folders_of_the_same_name() -> None:
    assert all(callable(getattr(ops, name)) for name in ("embedding", "moe", "rope"))
    assert len(set(ops.__all__)) == len(ops.__all__)


def test_importing_ops_loads_neither_triton_nor_the_kernels_of_a_gpu() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import ops
ops.describe()
print(*sorted(name for name in set(sys.modules) - before if "triton" in name or name.startswith("cuda.")))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
