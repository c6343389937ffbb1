"""Errors of the engine.

EngineError
├── ContextTooLong     the prompt and one token do not fit: the client's doing
├── Busy               try again later
│   ├── QueueFull
│   └── CallerLimit    this caller has as much as he may
├── EngineStopped      draining, or dead
├── AdapterGone        it was unloaded between being found and being used
├── AdapterRefused     of `AdapterClient` alone: it cannot be served, for a reason its owner can act on
├── ProbeFailed        of `probe` alone: a token could not be computed
├── ProfileError       of the two about profiles: there is one already, or none, or it cannot be recorded
└── SleepError         of `sleep` and `wake_up`: it cannot, or could not"""

from __future__ import annotations


class EngineError(Exception):
    """Raised by `submit`; nothing of the call was admitted."""


class ContextTooLong(EngineError):
    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens; the context holds {limit}, those to be generated included"
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class Busy(EngineError):
    """Error: a limit refuses the request. `reason` names the limit in metrics; a retry after `retry_after_s` seconds is
    likely to succeed."""

    def __init__(self, message: str, reason: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class QueueFull(Busy):
    def __init__(self, waiting: int, limit: int, *, unit: str = "requests", retry_after_s: float = 1.0) -> None:
        reason = "max_num_queued_reqs" if unit == "requests" else "max_num_queued_tokens"
        super().__init__(f"{waiting} {unit} are waiting; the limit is {limit}", reason, retry_after_s)


class CallerLimit(Busy):
    pass


class EngineStopped(EngineError):
    pass


class AdapterGone(EngineError):
    pass


class AdapterRefused(EngineError):
    pass


class ProbeFailed(EngineError):
    pass


class ProfileError(EngineError):
    pass


class SleepError(EngineError):
    pass
