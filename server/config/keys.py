"""API keys, of flags and of a file; no complaint has one in it."""

from __future__ import annotations

import re
from pathlib import Path

from server.config.server_options import ConfigError, ServerOptions

KEY = re.compile(r"[!-~]+")


def user_keys(options: ServerOptions) -> tuple[str, ...]:
    """Keys of --api-key and of --api-key-file. Raises ConfigError where the file has none or cannot be read."""
    if options.api_key_file is None:
        return options.api_key
    try:
        lines = Path(options.api_key_file).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"--api-key-file {options.api_key_file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {options.api_key_file} is not text") from None
    keys = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    for number, key in keys.items():
        if not KEY.fullmatch(key):
            raise ConfigError(
                f"--api-key-file {options.api_key_file}: line {number} is not one key of visible ASCII characters"
            )
    if not keys:
        raise ConfigError(f"--api-key-file {options.api_key_file} has no key in it")
    return tuple(dict.fromkeys([*options.api_key, *keys.values()]))
