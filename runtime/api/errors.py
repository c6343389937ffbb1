"""Errors of the engine.

EngineError ├── ContextTooLong the prompt and one token exceed the context: an error of the client ├── Busy try again later │
├── QueueFull the engine's queue is full │ └── CallerLimit the caller has reached its own limit ├── EngineStopped draining,
or dead ├── AdapterGone the adapter was unloaded between lookup and use ├── AdapterRefused raised by `AdapterClient` only:
the adapter is not supported, for a reason that its owner can fix ├── ProbeFailed raised by `probe` only: a token could not
be computed ├── ProfileError a profile is running already, or none is, or recording failed └── SleepError raised by `sleep`
and `wake_up`: the engine cannot sleep, or could not wake"""

from __future__ import annotations


class EngineError(Exception):
    """Base of errors that `submit` raises. None of the call's requests was admitted."""


class ContextTooLong(EngineError):
    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens; the context has {limit}, including generated tokens")
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class Busy(EngineError):
    """Error: a limit rejects the request. `reason` names the limit in metrics; a retry after `retry_after_s` seconds is
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
