"""Authorisation: API keys of users and the administrator, checked before routing and before a body is read.

If any key is configured, every path requires one except OPEN_PATHS and pages; so do unknown paths. A user key opens all paths,
except `ADMIN_PATHS` if an administrator's key is configured. The administrator's key opens everything. Keys are stored as
digests, and never shown, logged or returned."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.call import call_in
from server.http.errors import AdminOnly, InvalidApiKey, MissingApiKey

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/generate", "/ping"})
PAGES = frozenset(
    {"/", "/docs", "/dashboard"}
)  # the same for everybody: a key is typed into them, and goes with what they ask for
PAGE_ASSETS = "/web/"
ADMIN_PATHS = frozenset({"/metrics", "/dashboard/feed"})
# What changes the server for everybody. Without an administrator's key only a server that nobody but this machine reaches, and
# that has no users' keys either, does so.
OPERATOR_PATHS = frozenset(
    {
        "/log_level",
        "/reset_prefix_cache",
        "/abort_requests",
        "/drain",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/dashboard/texts",
        "/api/pull",
        "/api/delete",
    }
)


KEY_SUBPROTOCOL = "openai-insecure-api-key."  # OpenAI's, followed by the key


def is_open(path: str) -> bool:
    """Return whether `path` can be requested without a key."""
    return path in OPEN_PATHS or path in PAGES or path.startswith(PAGE_ASSETS)


def needs_admin(path: str, *, user_key: bool, admin_key: bool) -> bool:
    """Return whether `path` requires the administrator's key. `user_key`, `admin_key`: whether such keys are configured."""
    return (path in ADMIN_PATHS and admin_key) or (path in OPERATOR_PATHS and (user_key or admin_key))


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on `host` is reachable from this machine only. False for unknown names."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Keys:
    """Accepted keys. `users`: digest of each user's key. The methods `user` and `is_admin` take constant time."""

    def __init__(self, user: Iterable[str] = (), admin: str | None = None, secret: bytes | None = None) -> None:
        """Store the digests of the keys. Processes with the same `secret` compute the same digests."""
        self._secret = secret or os.urandom(32)
        self.users = [self._digest(key.encode("ascii")) for key in user]
        self._admin = [] if admin is None else [self._digest(admin.encode("ascii"))]

    @property
    def has_user(self) -> bool:
        return bool(self.users)

    @property
    def has_admin(self) -> bool:
        return bool(self._admin)

    def __bool__(self) -> bool:
        return self.has_user or self.has_admin

    def user(self, given: Iterable[bytes]) -> bytes | None:
        """Return the digest of the first key in `given` that is a user key, or None if there is none."""
        return self._match(given, self.users)

    def is_admin(self, given: Iterable[bytes]) -> bool:
        return self._match(given, self._admin) is not None

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()

    def _match(self, given: Iterable[bytes], digests: list[bytes]) -> bytes | None:
        found = None
        for key in given:
            digest = self._digest(key)
            for known in digests:
                if hmac.compare_digest(digest, known):  # no early exit: time would tell which one is near
                    found = known
        return found


def presented(scope: Scope) -> list[bytes]:
    """Return a request's keys: the first `Authorization: Bearer`, the first `x-api-key`, and keys in WebSocket subprotocols."""
    authorization = x_api_key = None
    for name, value in scope["headers"]:
        if name == b"authorization" and authorization is None:
            authorization = value
        elif name == b"x-api-key" and x_api_key is None:
            x_api_key = value.strip()
    keys = [x_api_key] if x_api_key else []
    offered = scope.get("subprotocols", ())  # of a WebSocket, to which a browser's script can add no header
    keys += [each[len(KEY_SUBPROTOCOL) :].encode() for each in offered if each.startswith(KEY_SUBPROTOCOL)]
    scheme, _, token = (authorization or b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        keys.append(token.strip())
    return keys


class RequireKey:
    """Middleware that requires keys. `paths`: path labels of the metric of refused requests; all other paths count as "unknown".
    `is_private`: True if only this machine can connect."""

    def __init__(self, app: ASGIApp, keys: Keys, paths: Collection[str] = (), *, is_private: bool = True) -> None:
        self._app = app
        self._keys = keys
        self._paths = frozenset(paths)
        self._is_private = is_private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not is_open(path):
            if path in self._paths:
                call_in(scope).route = path
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Check the keys of a request. Raises MissingApiKey, InvalidApiKey or AdminOnly."""
        keys, path, given = self._keys, scope["path"], presented(scope)
        is_admin, user = keys.is_admin(given), keys.user(given)
        call = call_in(scope)
        call.key, call.is_admin = user, is_admin
        admin_only = needs_admin(path, user_key=keys.has_user, admin_key=keys.has_admin)
        if not keys and path in OPERATOR_PATHS and not self._is_private:
            raise AdminOnly(path, has_key=False)
        if is_admin or not (admin_only or keys.has_user):
            return
        if user is not None:
            if admin_only:
                raise AdminOnly(path, has_key=keys.has_admin)
            return
        raise InvalidApiKey if given else MissingApiKey
