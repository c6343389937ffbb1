"""OpenAI-compatible HTTP server on top of `runtime`, and the Python interface `LLM` to the same engine.

Nothing heavy is imported here: `python -m server --help` imports this module."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from server.config import __version__ as __version__

if TYPE_CHECKING:
    from server.llm.asgi import Application as Application
    from server.llm.asgi import asgi as asgi
    from server.llm.async_llm import AsyncLLM as AsyncLLM
    from server.llm.core import LoadError as LoadError
    from server.llm.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from server.llm.engine_args import EngineArgs as EngineArgs
    from server.llm.engine_args import FlexibleArgumentParser as FlexibleArgumentParser
    from server.llm.llm import LLM as LLM
    from server.llm.lora_request import LoRARequest as LoRARequest
    from server.llm.metrics import Counter as Counter
    from server.llm.metrics import Gauge as Gauge
    from server.llm.metrics import Histogram as Histogram
    from server.llm.metrics import Vector as Vector
    from server.llm.outputs import BeamSearchParams as BeamSearchParams
    from server.llm.outputs import CompletionOutput as CompletionOutput
    from server.llm.outputs import RequestOutput as RequestOutput
    from server.llm.outputs import RequestOutputKind as RequestOutputKind
    from server.llm.pooling import ClassificationRequestOutput as ClassificationRequestOutput
    from server.llm.pooling import EmbeddingRequestOutput as EmbeddingRequestOutput
    from server.llm.pooling import PoolingParams as PoolingParams
    from server.llm.pooling import PoolingRequestOutput as PoolingRequestOutput
    from server.llm.pooling import ScoringRequestOutput as ScoringRequestOutput
    from server.llm.prepare import SamplingParams as SamplingParams
    from server.llm.prepare import StructuredOutputsParams as StructuredOutputsParams
    from server.llm.prompts import EmbedsPrompt as EmbedsPrompt
    from server.llm.prompts import TextPrompt as TextPrompt
    from server.llm.prompts import TokensPrompt as TokensPrompt

# Names for programs, by the module that has each.
_NAMES = {
    "llm.asgi": ("Application", "asgi"),
    "llm.async_llm": ("AsyncLLM",),
    "llm.core": ("LoadError",),
    "llm.engine_args": ("AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser"),
    "llm.llm": ("LLM",),
    "llm.lora_request": ("LoRARequest",),
    "llm.metrics": ("Counter", "Gauge", "Histogram", "Vector"),
    "llm.outputs": ("BeamSearchParams", "CompletionOutput", "RequestOutput", "RequestOutputKind"),
    "llm.pooling": (
        "ClassificationRequestOutput", "EmbeddingRequestOutput", "PoolingParams", "PoolingRequestOutput", "ScoringRequestOutput",
    ),
    "llm.prepare": ("SamplingParams", "StructuredOutputsParams"),
    "llm.prompts": ("EmbedsPrompt", "TextPrompt", "TokensPrompt"),
}  # fmt: skip
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
