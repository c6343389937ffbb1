"""Text and HTTP: the OpenAI-compatible server above `runtime`, and the same engine for Python programs: `LLM`.

Nothing heavy is imported here: `python -m server --help` comes this way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from server.config.version import __version__ as __version__

if TYPE_CHECKING:
    from server.offline.beams import BeamSearchParams as BeamSearchParams
    from server.offline.llm import LLM as LLM
    from server.offline.lora_request import LoRARequest as LoRARequest
    from server.offline.outputs import CompletionOutput as CompletionOutput
    from server.offline.outputs import RequestOutput as RequestOutput
    from server.offline.pooling import PoolingParams as PoolingParams
    from server.offline.prepare import SamplingParams as SamplingParams

_OF_LLM = frozenset(
    {"LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "BeamSearchParams", "PoolingParams", "LoRARequest"}
)


def __getattr__(name: str) -> Any:
    if name in _OF_LLM:
        import server.offline.llm

        return getattr(server.offline.llm, name)
    raise AttributeError(f"module 'server' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_LLM})
