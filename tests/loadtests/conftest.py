"""A toy server and a small model's shape for the commands' tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loadtests.test_engine import TINY
from tests.loadtests.test_processes import toy, wait_healthy


@pytest.fixture
def served(tmp_path) -> Iterator[tuple[str, int]]:
    """Base URL and pid of a toy."""
    process, address = toy(tmp_path)
    with process:
        wait_healthy(process, address)
        yield address.url, process.pid


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder with a config.json."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder
