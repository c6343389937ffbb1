"""TLS: the server's certificate, and whether clients have to show one."""

from __future__ import annotations

import ssl

from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError


def context(config: ServerConfig) -> ssl.SSLContext | None:
    """What connections are secured by, None where they are not.

    Raises ConfigError for files that are not what they should be."""
    if config.ssl_certfile is None:
        return None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.set_alpn_protocols(["http/1.1"])
    made.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    try:
        made.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        key = "" if config.ssl_keyfile is None else f" --ssl-keyfile {config.ssl_keyfile}"
        raise ConfigError(f"--ssl-certfile {config.ssl_certfile}{key}: {_words(error)}") from None
    if config.ssl_ca_certs is not None:
        try:
            made.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {_words(error)}") from None
    return made


def _no_password() -> str:
    """Asked for by a key that is encrypted; without it, OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted, and nobody is here to type its password")


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"no certificate and key in PEM that belong together ({error.reason or error})"
    return getattr(error, "strerror", None) or str(error)
