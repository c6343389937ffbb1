"""Text and HTTP: the OpenAI-compatible server above `runtime`, and the same engine for Python programs: `LLM`.

Nothing heavy is imported here: `python -m server --help` comes this way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from server.config import __version__ as __version__

if TYPE_CHECKING:
    from server.llm.llm import LLM as LLM
    from server.llm.lora_request import LoRARequest as LoRARequest
    from server.llm.outputs import BeamSearchParams as BeamSearchParams
    from server.llm.outputs import CompletionOutput as CompletionOutput
    from server.llm.outputs import RequestOutput as RequestOutput
    from server.llm.pooling import PoolingParams as PoolingParams
    from server.llm.prepare import SamplingParams as SamplingParams

_OF_LLM = frozenset(
    {"LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "BeamSearchParams", "PoolingParams", "LoRARequest"}
)


def __getattr__(name: str) -> Any:
    if name in _OF_LLM:
        import server.llm.llm

        return getattr(server.llm.llm, name)
    raise AttributeError(f"module 'server' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_LLM})
