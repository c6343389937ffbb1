"""Interface between `server` and `runtime`. The server submits requests; the engine returns token ids and finish reasons.

Imports the standard library only, so the HTTP layer can be imported, type-checked and tested without torch. No text passes
through this interface."""

from runtime.api.client import AdapterClient, EngineClient
from runtime.api.errors import (
    AdapterGone,
    AdapterRefused,
    Busy,
    CallerLimit,
    ContextTooLong,
    EngineError,
    EngineStopped,
    ProbeFailed,
    ProfileError,
    QueueFull,
    SleepError,
)
from runtime.api.media import EMBEDS, MediaItem, beside_pictures
from runtime.api.model import ModelInfo, ModelOutline, PoolerInfo, SpeechInfo
from runtime.api.outputs import FinishReason, Output, Take, TokenLogprobs, TokenStream, TokenWriter, WriterOf
from runtime.api.requests import (
    Adapter,
    Bitmask,
    CacheRoot,
    ConstraintError,
    MatcherFactory,
    PoolingParams,
    PoolingTask,
    PreparedPrompt,
    Request,
    SamplingParams,
    SequencePooling,
    TokenMatcher,
    TranscriptRules,
    cache_root,
)
from runtime.api.state import (
    Activity,
    EngineHealth,
    Finished,
    HistogramData,
    KVMap,
    LoadProgress,
    Metric,
    RequestEvent,
    RequestRecord,
    SleepLevel,
    StepRecord,
)
