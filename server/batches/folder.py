"""BatchFolder: the folder of --batch-dir, with files, batches and the secret of key digests. One process at a time uses it."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from server.batches.files import ADMINISTRATOR, FileStore, Shares
from server.batches.store import BatchStore
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from server.http.auth import Keys

SECRET_BYTES = 32


class BatchFolder:
    """Open and locked folder of --batch-dir. Raises ConfigError if the folder is unusable, or locked by another process."""

    def __init__(
        self, path: Path, *, max_files: int, max_bytes: int, keys: Sequence[str], admin_key: str | None
    ) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (path / "lock").open("wb")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.close()
                raise ConfigError(f"--batch-dir {path} is used by another process") from None
            self.secret = _secret(path / "secret")
            self.shares = Shares(_owners(Keys(keys, admin_key, self.secret)))
            self.files = FileStore(path / "files", max_files=max_files, max_bytes=max_bytes, shares=self.shares)
            self.batches = BatchStore(path / "batches")
        except OSError as error:
            raise ConfigError(f"--batch-dir {path}: {error.strerror}") from None

    @classmethod
    def of(cls, config: ServerConfig) -> BatchFolder | None:
        """Open the folder of --batch-dir. Return None without that option."""
        if config.batch_dir is None:
            return None
        if importlib.util.find_spec("python_multipart") is None:
            raise ConfigError("--batch-dir needs a package that reads forms: pip install oneloop[batches]")
        return cls(
            Path(config.batch_dir),
            max_files=config.max_batch_files,
            max_bytes=config.max_batch_bytes,
            keys=config.user_keys(),
            admin_key=config.admin_api_key,
        )

    def close(self) -> None:
        """Release the lock, so that another process may use the folder."""
        self._lock.close()


def _owners(keys: Keys) -> list[str]:
    """Return the owners of files, in the form of `StoredFile.owner`, that requests with `keys` have."""
    return [digest.hex() for digest in keys.users] + [ADMINISTRATOR] * keys.has_admin


def _secret(path: Path) -> bytes:
    """Return the secret for key digests. It is created once and kept in `path`, so that files keep their owner after a restart."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_bytes()
    with os.fdopen(descriptor, "wb") as file:
        found = os.urandom(SECRET_BYTES)
        file.write(found)
    return found
