"""Terminal output while the server starts: progress, and a summary at the end.

A terminal shows a progress bar for each phase with a known total and a line for each other phase. A file or pipe gets a line per
phase; a program that reads the log gets a log record. Uses the standard library, and tqdm for bars."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from runtime.api import LoadProgress
from server.config import __version__
from server.models.model import SPEECH_TASKS, LoadedModel

PAGES = "/ (chat)  /dashboard  /docs (all routes)"
APIS = "/v1/chat/completions  /v1/completions  /v1/responses  /v1/messages  /api/chat (Ollama)"
SPEECH_APIS = "/v1/audio/transcriptions  /v1/audio/translations"
POOLING_APIS = "/v1/embeddings  /v2/embed  /pooling  /classify  /score  /rerank  /api/embed (Ollama)"


class StartupDisplay:
    """Display of the loading progress. `report` may be called from any thread, `finish` once. `began_s`: start of the phase
    "start" by `time.monotonic()`; None if there is no such phase. `log`: receives each line instead of `out`."""

    def __init__(self, out: TextIO, began_s: float | None = None, log: Callable[[str], None] | None = None) -> None:
        self._out = out
        self._log = log
        self._interactive = log is None and out.isatty()
        self._lock = threading.Lock()
        self._phase: str | None = None if began_s is None else "start"
        self._since_s = time.monotonic() if began_s is None else began_s
        self._seconds: dict[str, float] = {}
        self._bar: Any = None

    def report(self, progress: LoadProgress) -> None:
        with self._lock:
            if progress.phase != self._phase:
                self._end_phase()
                self._phase = progress.phase
                if self._log is not None:
                    self._log(f"loading: {progress.phase}")
                elif not (self._interactive and progress.total):
                    print(f"oneloop: {progress.phase} …", file=self._out, flush=True)
            if self._interactive and progress.total:
                self._draw(progress)

    def finish(self) -> dict[str, float]:
        """End the last phase, and return the duration of each phase in seconds."""
        with self._lock:
            self._end_phase()
            return self._seconds

    def _end_phase(self) -> None:
        now_s = time.monotonic()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now_s - self._since_s
        self._phase, self._since_s = None, now_s
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _draw(self, progress: LoadProgress) -> None:
        if self._bar is None:
            from tqdm import tqdm  # only where a person is looking

            is_bytes = progress.unit == "B"
            self._bar = tqdm(
                total=progress.total, desc=progress.phase, unit=progress.unit or "it", unit_scale=is_bytes,
                unit_divisor=1024 if is_bytes else 1000, file=self._out, leave=False, dynamic_ncols=True,
            )  # fmt: skip
        self._bar.update(progress.done - self._bar.n)


def summary(loaded: LoadedModel, url: str, seconds: dict[str, float], total_s: float) -> str:
    """Return the summary shown when the server is ready, at most a dozen lines."""
    model = loaded.engine.model
    phases = ", ".join(f"{phase} {duration:.1f}" for phase, duration in seconds.items() if duration >= 0.05)
    kept = f" of {model.kv_cache_note}" if model.kv_cache_note else ""
    caching = "on" if model.prefix_caching else "off"
    apis = APIS if loaded.pooling is None else f"{POOLING_APIS}; to {', '.join(loaded.pooling.tasks)}"
    if loaded.speech is not None:
        apis = SPEECH_APIS
    lines = [
        ("model", f"{', '.join(loaded.names)}: {model.architecture}, {_count(model.num_parameters)} parameters"),
        (
            "weights",
            f"{size_of(model.weights_bytes)}{_source(loaded)}{_replicas(loaded)}, computed in {model.dtype} on {model.device}",
        ),
        *((("devices", model.topology),) if model.topology else ()),
        ("context", f"{model.max_model_len:,} tokens; up to {model.max_num_seqs} sequences at once"),
        (
            "KV cache",
            f"{size_of(model.kv_cache_bytes)}{kept}: {model.max_concurrency:,.1f} sequences of {model.max_model_len:,} tokens; "
            f"prefix caching {caching}",
        ),
        *((("drafts", model.speculative),) if model.speculative else ()),
        *(("beside it", _beside(each)) for each in loaded.besides),
        *((("others", _others(loaded)),) if loaded.others else ()),
        ("pages", PAGES),
        ("APIs", apis),
        ("started", f"in {total_s:.1f} s ({phases})" if phases else f"in {total_s:.1f} s"),
    ]
    body = "\n".join(f"  {title:<10}{text}" for title, text in lines)
    return f"oneloop {__version__} serves on {url} (Ctrl-C ends it when running requests have finished)\n{body}"


def _source(loaded: LoadedModel) -> str:
    """Return the quantisation of a GGUF file, or "". The dtype of the weights in the engine does not show it."""
    return "" if loaded.gguf_quantization is None else f" from a GGUF file of type {loaded.gguf_quantization}"


def _replicas(loaded: LoadedModel) -> str:
    num = len(loaded.engine.replicas)
    return "" if num == 1 else f"; {num} replicas, numbers are totals"


def _beside(loaded: LoadedModel) -> str:
    """Return a line about `loaded`, which is served in addition to the first model."""
    model, tasks = loaded.engine.model, ", ".join(SPEECH_TASKS if loaded.pooling is None else loaded.pooling.tasks)
    return f"{loaded.name}: {model.architecture}, {size_of(model.weights_bytes)}, {model.max_model_len:,} tokens; to {tasks}"


def _others(loaded: LoadedModel) -> str:
    """Return a line about the other models, which are loaded on demand."""
    return f"{', '.join(each.name for each in loaded.others)}: loaded when requests name them"


def url_of(address: Any, *, secured: bool = False) -> str:
    """Return the URL of `address`, the value of a socket's getsockname(). `secured`: https instead of http."""
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address[0], address[1]
    scheme = "https" if secured else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def size_of(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB" if num_bytes >= 1024**3 else f"{num_bytes / 1024**2:.0f} MiB"


def _count(number: int) -> str:
    for scale, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:,}"
