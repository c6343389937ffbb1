"""ServeFleet: a `Fleet` that uses Ray Serve's deployment handle, and converts its exceptions to those of this server."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from server.http.errors import ReplicaLost, TooManyRequests, Unavailable
from server.ray.channel import Delivery, Mailbox
from server.ray.exchange import Forwarded, ReplicaAnswer

RETRY_AFTER_S = 5
BROADCAST_LIMIT_S = 30.0


class ServeFleet:
    """Replicas of a Ray Serve deployment as a `Fleet`. `host`: address of this machine to which replicas can connect."""

    def __init__(self, replicas: DeploymentHandle, host: str) -> None:
        """Create the fleet. Call it on the running event loop."""
        self._replicas = replicas
        self._mailbox = Mailbox(host)

    async def answer(self, request: Forwarded) -> Delivery:
        box = await self._mailbox.open()
        called = self._replicas.deliver.remote(request, box.reply_to)
        return Delivery(box, called, called.cancel, _as_ours)

    async def answer_all(self, request: Forwarded) -> list[ReplicaAnswer]:
        try:
            answers: list[ReplicaAnswer] = await self._replicas.broadcast("answer_whole", request).results_async(
                timeout_s=BROADCAST_LIMIT_S
            )
        except Exception as error:
            raise _as_ours(error) from error
        return answers


def _as_ours(error: Exception) -> Exception:
    match error:
        case RayTaskError():
            pass  # of the replica's own code: our fault, for the log
        case RayActorError() | ReplicaUnavailableError():
            return ReplicaLost()
        case BackPressureError():
            return TooManyRequests(
                "The server is busy: too many requests wait for a replica", retry_after_s=RETRY_AFTER_S
            )
        case DeploymentUnavailableError() | TimeoutError():
            return Unavailable("No replica is running", retry_after_s=RETRY_AFTER_S)
    return error
