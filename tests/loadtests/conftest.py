"""A toy server for the commands' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.loadtests.test_processes import toy, wait_healthy


@pytest.fixture
def served(tmp_path) -> Iterator[tuple[str, int]]:
    """Base URL and pid of a toy."""
    process, address = toy(tmp_path)
    with process:
        wait_healthy(process, address)
        yield address.url, process.pid
