"""Errors of the engine, all derived from EngineError.
- ContextTooLong: the prompt and one token exceed the context. Busy (QueueFull, CallerLimit): retry later.
- EngineStopped: the engine drains or has failed permanently. AdapterGone: the adapter was unloaded between lookup and use.
- AdapterRefused, raised only by `AdapterClient`: the adapter is not supported, for a reason that its owner can fix.
- ProbeFailed, raised only by `probe`: a token could not be computed.
- ProfileError: a profile is already running, or none is running, or recording failed.
- SleepError, raised only by `sleep` and `wake_up`: the engine could not sleep or could not wake."""

from __future__ import annotations


class EngineError(Exception):
    """Base class of the engine's errors. If `submit` raises one, none of its requests was admitted."""


class ContextTooLong(EngineError):
    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens; the context has {limit}, including generated tokens")
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class Busy(EngineError):
    """Error: a limit rejects the request. `reason`: name of the limit, for metrics. `retry_after_s`: number of seconds after
    which a retry is likely to succeed."""

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
