"""Terms: what of a request is about the engine and not about the answer. Until when, in whose prefix cache, how urgent; and its
prompt, prepared off the loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from runtime.api import MediaItem, PreparedPrompt
from server.config.server_config import ServerConfig
from server.context.arrival import Arrival
from server.context.offload import SHORT_CHARS, Offload
from server.loaded.model import LoadedModel
from server.wire.errors import Field, InvalidRequest

PRIORITY = Field("priority")
LONG_PROMPT = SHORT_CHARS  # tokens: to check and hash them is about as much work as to tokenise so many characters


def deadline_s(config: ServerConfig, timeout_s: float | None, arrival: Arrival) -> float | None:
    """`timeout_s`: the body's. Of body and header the shorter counts; the server's own only where neither is there."""
    given = [each for each in (timeout_s, arrival.timeout_s) if each is not None]
    shortest = min(given, default=config.request_timeout)
    return None if shortest is None else arrival.time_s + shortest


def cache_salt(config: ServerConfig, given: str | None, arrival: Arrival) -> str | None:
    """Clients divide what is theirs by their own salts, in which there is no slash."""
    if arrival.tenant is None or config.shared_prefix_cache:
        return given
    return f"{arrival.tenant}/{given or ''}"


def check_priority(config: ServerConfig, priority: int) -> None:
    """Raises InvalidRequest where the scheduler knows no priorities."""
    if priority and config.scheduling_policy != "priority":
        raise InvalidRequest(PRIORITY, " needs a server started with --scheduling-policy priority", param=PRIORITY)


async def prepared(
    loaded: LoadedModel, offload: Offload, ids: Sequence[int], salt: str | None, media: tuple[MediaItem, ...] = ()
) -> PreparedPrompt | None:
    """A long prompt checked and hashed on a thread, so that to submit it costs the loop next to nothing; None for a short one."""
    if len(ids) <= LONG_PROMPT:
        return None
    return await offload.run(len(ids), partial(loaded.engine.prepare, ids, salt, loaded.adapter, media))
