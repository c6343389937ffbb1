"""Clients that have no place in our own environment (requirements/clients.txt says why): where they are not installed, their tests
are not there, and to ask for nothing but these is an error."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

CLIENTS = {"cohere", "guidance", "instructor", "langchain_openai", "litellm", "llama_index", "lm_eval"}
collect_ignore_glob = ["test_*.py"] if any(find_spec(name) is None for name in CLIENTS) else []


@pytest.fixture
def model(server) -> str:
    return server.get("/v1/models")[1]["data"][0]["id"]
