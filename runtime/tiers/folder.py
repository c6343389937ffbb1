"""Folder of --kv-disk: the secret key with which block names are hashed, and the fingerprint of a model's files."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.weights.fetch import ModelFiles

_KEY_FILE = "key"
_SAMPLE_BYTES = 64 << 10  # at the start and the end of each file of weights


def folder_key(folder: Path) -> bytes:
    """Return the folder's key, 32 random bytes with which block names are hashed. The first server that uses the folder creates it.
    Without the key, a prompt's blocks cannot be found, and a file cannot be matched to a prompt. Raises OSError if the key cannot
    be read or written, and ValueError if it has another length."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    path = folder / _KEY_FILE
    if not path.exists():
        drawn = folder / f"{_KEY_FILE}.{os.getpid()}-{os.urandom(4).hex()}"
        with open(drawn, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(os.urandom(32))
        try:
            os.link(drawn, path)  # of several servers that start together one is the first
        except FileExistsError:
            pass
        finally:
            drawn.unlink()
    key = path.read_bytes()
    if len(key) != 32:
        raise ValueError(f"{path} has {len(key)} bytes instead of 32: remove the folder's files")
    return key


def fingerprint(files: ModelFiles, draft: ModelFiles | None, load: str) -> bytes:
    """Return 32 bytes that identify the weights of a model and of its draft model. They are a hash of the configuration and of each
    file's name, size, modification time, first and last bytes. `load`: option for random weights instead of those in the files."""
    digest = sha256(load.encode())
    for each in filter(None, (files, draft)):
        digest.update(repr(sorted(each.config.items())).encode())
        paths = [each.path] if each.gguf is not None else sorted(each.path.glob("*.safetensors"))
        for path in paths:
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
            with path.open("rb") as file:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(0, status.st_size - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
