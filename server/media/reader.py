"""Media reader: converts a request's media parts to placeholders in the prompt and inputs of the model's encoder.

Remote files are downloaded on the event loop. All other work runs on threads in short pieces, so that requests alternate and
cancelled work stops early. Sizes are checked before decompression. Results are cached, because each request of a conversation
sends all its images again."""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from runtime.api import EMBEDS
from server.http.errors import InvalidMedia, InvalidRequest, MediaNotInstalled, TextOnly, TooManyRequests, clip
from server.http.offload import RETRY_AFTER_S, Offload, Pieces
from server.http.watch import gather_or_cancel
from server.media.decode import DecodedItem, decode, fingerprint, sample
from server.media.embeds import read_embeds
from server.media.limits import MODALITIES, USE_SOUND, MediaLimits, check_processor_kwargs
from server.media.part import Given, MediaPart
from server.media.placeholders import Expansion, PromptMedia, ReadMedia
from server.media.processor import Processor, Refused
from server.media.source import Sources

_Key = tuple[str | None, bytes]
COST = 1 << 20  # of one item, as texts are counted: very much


class NoMedia:
    """Media reader of a model that accepts text only. `why`: reason if the model supports media but they cannot be read."""

    modalities: frozenset[str] = frozenset()

    def __init__(self, why: str | None = None) -> None:
        self._why = why

    async def read(
        self, parts: Sequence[MediaPart], processor_kwargs: Mapping[str, Any] | None = None, tenant: str | None = None
    ) -> NoReturn:
        """Raise TextOnly, or MediaNotInstalled if the model supports media. Never returns."""
        part = parts[0]
        if self._why is not None:
            raise MediaNotInstalled(self._why, part.where)
        raise TextOnly(part.where, part.kind, param=part.where)


class MediaReader:
    """Reader of a model's media parts. `io_kwargs`: decoder options by modality. `processor_kwargs`: default processor options.
    `cache_bytes`: maximum size of the cache. `max_held_bytes`: maximum size of the media in use by all requests, besides the
    cache. `is_shared`: API keys share the cache; timing then reveals which media other keys have sent. `takes_embeds`: clients
    may send encoder outputs."""

    def __init__(
        self,
        processor: Processor,
        modalities: frozenset[str],
        sources: Sources,
        workers: Offload,
        limits: MediaLimits,
        *,
        io_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        processor_kwargs: Mapping[str, Any] | None = None,
        cache_bytes: int = 0,
        max_held_bytes: int = 16 * 1024**3,
        is_shared: bool = False,
        takes_embeds: bool = False,
    ) -> None:
        self.processor = processor
        self.modalities = modalities & processor.modalities
        self._sources = sources
        self._workers = workers
        self._limits = limits
        self._io_kwargs = io_kwargs or {}
        self._processor_kwargs = processor_kwargs or {}
        self._cache = _Cache(cache_bytes)
        self._held = _Held(max_held_bytes + cache_bytes)
        self._is_shared = is_shared
        self._takes_embeds = takes_embeds
        self._around: dict[str, Expansion] = {}  # what stands for a sample, by modality

    async def read(
        self, parts: Sequence[MediaPart], processor_kwargs: Mapping[str, Any] | None = None, tenant: str | None = None
    ) -> PromptMedia:
        """Read the media parts of one request. `processor_kwargs`: the request's options, which override the operator's. `tenant`:
        owner of the cache entries.

        Raises TextOnly, InvalidMedia or another InvalidRequest that names the part's field. Raises TooManyRequests if memory is
        full."""
        self._check(parts)
        try:
            check_processor_kwargs(processor_kwargs or {})
        except ValueError as error:
            raise InvalidRequest(f"mm_processor_kwargs: {clip(error)}", param="mm_processor_kwargs") from None
        options = {**self._processor_kwargs, **(processor_kwargs or {})}
        if options.get(USE_SOUND) and not (self.processor.hears_videos and {"audio", "video"} <= self.modalities):
            raise InvalidRequest(
                f"mm_processor_kwargs: {USE_SOUND}: this model does not support audio of videos",
                param="mm_processor_kwargs",
            )
        read = await gather_or_cancel(self._read(part, options, tenant) for part in parts)
        made = self.processor
        return PromptMedia(read, made.tokens, made.output_ids, made.layout, made.tells_apart)

    def _check(self, parts: Sequence[MediaPart]) -> None:
        counts = Counter[str]()
        for part in parts:
            if part.modality not in self.modalities:
                raise TextOnly(part.where, part.kind, param=part.where, takes=sorted(self.modalities))
            if part.is_embeds and not self._takes_embeds:
                raise InvalidRequest(
                    f"{part.where}: this server does not accept {part.kind}: start it with --enable-mm-embeds",
                    param=part.where,
                )
            counts[part.modality] += 1
            limit = self._limits.max_items.get(part.modality, 0)
            if counts[part.modality] > limit:
                raise InvalidRequest(
                    f"at most {limit} of {part.modality} may be in a prompt (--limit-mm-per-prompt)", param=part.where
                )

    async def _read(self, part: MediaPart, options: Mapping[str, Any], tenant: str | None) -> ReadMedia:
        data = await self._sources.fetch(part) if self._sources.is_remote(part) else None
        owner = None if self._is_shared else tenant
        return await self._workers.run_pieces(COST, self._work(part, data, options, owner))

    def probe(self) -> dict[str, str]:
        """Process a sample of each modality. Return the error messages by modality. Modalities that failed are rejected from now
        on."""
        refused: dict[str, str] = {}
        for modality in MODALITIES:
            if modality not in self.modalities:
                continue
            tried = sample(modality, self.processor.sampling_rate)
            try:
                self._around[modality], _ = self.processor.process(
                    modality, tried.value, {**_without_sound(self._processor_kwargs), **tried.options}
                )
            except Refused as error:
                refused[modality] = str(error)
        self.modalities -= refused.keys()
        return refused

    def _work(
        self, part: MediaPart, data: bytes | None, options: Mapping[str, Any], tenant: str | None
    ) -> Pieces[ReadMedia]:
        """Read one item; this runs on a thread. `data`: bytes of a remote file, or None. Raises InvalidMedia or TooManyRequests."""
        self._held.check()
        processor, source = self.processor, part.source
        value: Any
        if isinstance(source, Given) and not isinstance(source.value, bytes):
            value = source.value
        else:
            value = self._sources.read(part) if data is None else data
        digest = self._digest(part, value, options)
        key = (tenant, digest)
        if (kept := self._cache.get(key)) is not None:
            return kept
        yield
        if part.is_embeds:
            inputs = read_embeds(value, part.where)
            read = ReadMedia(part.modality, digest, self._expansion(part, len(inputs[EMBEDS])), inputs)
            self._held.note(read)
            self._cache.keep(key, read)
            return read
        decoded: DecodedItem = yield from decode(
            part, value, self._limits, self._io_kwargs.get(part.modality, {}), processor.sampling_rate,
            by_time=processor.hears_videos, with_sound=bool(options.get(USE_SOUND)),
        )  # fmt: skip
        yield
        try:
            expansion, tensors = processor.process(
                part.modality, decoded.value, {**_without_sound(options), **decoded.options}, decoded.sound
            )
        except Refused as error:
            raise InvalidMedia(f"the model's processor rejects it: {clip(error)}", part.where) from None
        sound = None
        if decoded.sound is not None:
            sound = {name: tensors.pop(name) for name in [*tensors] if "video" not in name}
        read = ReadMedia(part.modality, digest, expansion, tensors, sound)
        self._held.note(read)
        self._cache.keep(key, read)
        return read

    def _expansion(self, part: MediaPart, num_outputs: int) -> Expansion:
        """Return the prompt text for an item of `num_outputs` embeddings. Raises InvalidMedia."""
        around = self._around.get(part.modality)
        if around is None or len(around.runs) != 1:
            raise InvalidMedia(
                f"{part.kind} are not supported: this model has text between the tokens of an item", part.where
            )
        return Expansion(around.text, (num_outputs,))

    def _digest(self, part: MediaPart, value: Any, options: Mapping[str, Any]) -> bytes:
        kind = part.kind if part.is_embeds else part.modality
        how = json.dumps([kind, self._io_kwargs.get(part.modality, {}), dict(options)], sort_keys=True)
        found = hashlib.sha256(self.processor.fingerprint + how.encode())
        for piece in fingerprint(value, part.where):
            found.update(piece)
        return found.digest()


def _without_sound(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != USE_SOUND}


class _Held:
    """Thread-safe counter of the bytes of processed media in use, from the preparation of a prompt until its encoder has run."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.RLock()  # what is given up may be given up at any moment, in here too

    def check(self) -> None:
        """Raise TooManyRequests if the media in use exceed the limit."""
        if self._num_bytes > self._max_bytes:
            raise TooManyRequests(
                "The server is busy: the memory for images, audio and video is in use",
                retry_after_s=RETRY_AFTER_S,
            )

    def note(self, read: ReadMedia) -> None:
        for array in read.arrays:
            self._count(array.nbytes)
            weakref.finalize(array, self._count, -array.nbytes).atexit = False

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes


class _Cache:
    """Cache of processed items, keyed by (tenant, digest), with eviction of the least recently used. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[_Key, ReadMedia] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key) -> ReadMedia | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def keep(self, key: _Key, read: ReadMedia) -> None:
        if read.num_bytes > self._max_bytes:
            return
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = read
            self._num_bytes += read.num_bytes
            while self._num_bytes > self._max_bytes:
                _, gone = self._kept.popitem(last=False)
                self._num_bytes -= gone.num_bytes
