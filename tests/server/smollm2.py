"""The built-in model's tokenizer: ours, and transformers' from the same file."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from runtime.weights.fetch import DEFAULT_MODEL, resolve
from server.models.tokenizer import Tokenizer


@functools.cache
def _file() -> tuple[Path, dict[str, Any]]:
    files = resolve(DEFAULT_MODEL, None, lambda progress: None)
    assert files.gguf is not None
    return files.path, files.gguf.metadata


def metadata() -> dict[str, Any]:
    return _file()[1]


@functools.cache
def ours() -> Tokenizer:
    return Tokenizer.from_gguf(metadata())


@functools.cache
def transformers_own() -> Any:
    import transformers

    path = _file()[0]
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
