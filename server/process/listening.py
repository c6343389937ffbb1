"""Listening sockets: an address, a Unix socket, or a socket of a service manager. Also TLS and readiness notification (sd_notify).

The file of a Unix socket remains after a process is killed. The next process that binds the path removes the file if no process
listens there. A lock on the folder serialises processes that start at the same time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import ssl
import stat
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError

BACKLOG = 2048
_PASSED_FD = 3  # SD_LISTEN_FDS_START of sd_listen_fds(3)
_NOT_FOR_OTHERS = 0o117  # rw for user and group: connecting requires write permission


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host` and `port`. Clients may connect before the server accepts. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def listen_at(path: Path) -> Iterator[socket.socket]:
    """Listen at the Unix socket `path`, which is removed at the end of the block. Call it before other threads run: it changes
    the umask for a moment. Raises OSError, also if `path` is in use or is not a socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with sock:
        with _alone_in(path.parent):
            _remove_stale(path)
            usual = os.umask(_NOT_FOR_OTHERS)  # not chmod afterwards: nobody shall connect before
            try:
                sock.bind(str(path))
            finally:
                os.umask(usual)
            sock.listen(BACKLOG)
            made = path.stat()
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError), _alone_in(path.parent):
                if os.path.samestat(path.lstat(), made):  # else it is another's by now
                    path.unlink()


def passed(environ: MutableMapping[str, str]) -> socket.socket | None:
    """Return the socket that systemd or `systemd-socket-activate` opened for this process, by sd_listen_fds(3), or None. Its
    variables are removed from `environ`, for child processes. Raises OSError unless there is one listening stream socket."""
    names = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    pid, number, _ = (environ.pop(name, "") for name in names)
    if pid != str(os.getpid()) or number in ("", "0"):
        return None
    if number != "1":
        raise OSError(errno.EINVAL, f"the service manager passed {number} sockets; exactly one is supported")
    os.set_inheritable(_PASSED_FD, False)
    sock = socket.socket(fileno=_PASSED_FD)
    if sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise OSError(
            errno.EINVAL, "the service manager passed a socket that does not listen: set ListenStream= and Accept=no"
        )
    return sock


def tell_manager(state: str, environ: MutableMapping[str, str]) -> None:
    """Send `state`, READY=1 or STOPPING=1, to the service manager by sd_notify(3), if NOTIFY_SOCKET is set."""
    name = environ.get("NOTIFY_SOCKET", "")
    if name[:1] not in ("/", "@"):
        return
    address = "\0" + name[1:] if name[0] == "@" else name
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto(state.encode(), address)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Context in which `folder` is locked, so that only one process at a time runs the block."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "the path exists and is not a socket", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)  # a full backlog has a listener, too
        if client.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(path))
    path.unlink()


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context of connections, or None without a certificate. Raises ConfigError for unusable files."""
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
    """Reject an encrypted key, for which OpenSSL would otherwise prompt at the terminal."""
    raise ValueError("the private key is encrypted, which is not supported; decrypt it first")


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"no certificate and key in PEM that belong together ({error.reason or error})"
    return getattr(error, "strerror", None) or str(error)
