"""The `Fleet` of an ingress, over Serve's handle: its answers, its exceptions as ours."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from server.ray.forwarded import Answer, Forwarded, Piece
from server.wire.errors import ReplicaLost, TooManyRequests, Unavailable

RETRY_AFTER_S = 5
BROADCAST_LIMIT_S = 30.0


class ServeFleet:
    def __init__(self, replicas: DeploymentHandle) -> None:
        self._streaming = replicas.options(stream=True)
        self._replicas = replicas

    def answer(self, request: Forwarded) -> ServeStream:
        return ServeStream(self._streaming.answer.remote(request))

    async def answer_all(self, request: Forwarded) -> list[Answer]:
        try:
            answers: list[Answer] = await self._replicas.broadcast("answer_whole", request).results_async(
                timeout_s=BROADCAST_LIMIT_S
            )
        except Exception as error:
            raise _as_ours(error) from error
        return answers


class ServeStream:
    def __init__(self, pieces: DeploymentResponseGenerator) -> None:
        self._pieces = pieces

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._pieces.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        try:
            piece: Piece = await self._pieces.__anext__()
        except StopAsyncIteration:
            raise
        except Exception as error:
            raise _as_ours(error) from error
        return piece


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
            return Unavailable("No replica is there to answer", retry_after_s=RETRY_AFTER_S)
    return error
