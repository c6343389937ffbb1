"""Token writers: convert token ids to text and write each piece as an event in an HTTP chunk. The compiled module oneloop_text
writes many streams in one call. If oneloop was installed without a C++ compiler, slower Python code is used instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.json import encode

if TYPE_CHECKING:
    from server.text.detokenize import Detokenizer

try:
    import oneloop_text

    module: Any = oneloop_text
except ImportError:
    module = None

logger = logging.getLogger("oneloop.text")


class StreamConnection(Protocol):
    """HTTP connection of a stream. `chunk_writer`: function that writes one event as an HTTP/1.1 chunk, or None if it would
    block."""

    @property
    def chunk_writer(self) -> Callable[[bytes], None] | None: ...


class PythonTokenWriter:
    """Python version of `oneloop_text.TokenWriter`: writes the tokens of one answer as HTTP chunks. Each chunk is an event:
    `before`, the text as a JSON string, and `after`."""

    __slots__ = ("_after", "_before", "_connection", "_detokenizer", "_num_tokens", "is_open", "num_written")

    def __init__(self, detokenizer: Detokenizer, before: bytes, after: bytes, connection: StreamConnection) -> None:
        self._detokenizer = detokenizer
        self._before, self._after = before, after
        self._connection = connection
        self._num_tokens = 0  # since they were taken
        self.is_open = True
        self.num_written = 0  # chunks

    def take_num_tokens(self) -> int:
        taken, self._num_tokens = self._num_tokens, 0
        return taken

    def write(self, ids: list[int]) -> bool:
        """Write the text of the token ids `ids`. Return False without writing if the writer is closed or a write would block."""
        send = self._connection.chunk_writer if self.is_open else None
        self.is_open = send is not None
        if send is None:
            return False
        text = self._detokenizer.feed(ids)
        self._num_tokens += len(ids)
        if text:
            event = self._before + encode(text) + self._after
            self.num_written += 1
            send(b"%x\r\n%b\r\n" % (len(event), event))
        return True

    @staticmethod
    def write_all(work: list[Any]) -> list[tuple[Any, Exception | None]]:
        """Write each item (writer, ids, …) of `work`. Return the items that failed, with their errors; see
        `runtime.api.TokenWriter`."""
        failed: list[tuple[Any, Exception | None]] = []
        for each in work:
            try:
                if not each[0].write(each[1]):
                    failed.append((each, None))
            except Exception as error:
                failed.append((each, error))
        return failed


def token_writer(detokenizer: Detokenizer, before: bytes, after: bytes, connection: StreamConnection) -> Any:
    """Return a writer of ids to `connection`. Each event is `before`, the text of the ids as a JSON string, and `after`."""
    if module is None:
        return PythonTokenWriter(detokenizer, before, after, connection)
    return module.TokenWriter(detokenizer, before + b'"', b'"' + after, connection)


def warn_if_missing() -> None:
    """Log a warning if the compiled module is missing, with its measured effect (Qwen3-0.6B, 256 streams, H200, 2026-11-24)."""
    if module is None:
        logger.warning(
            "the compiled text module (oneloop_text) is not installed: streaming a token takes 2.2 times the CPU, and a small "
            "model with 256 streams loses 27 % of its throughput. Install a C++20 compiler and run pip install again."
        )
