"""Parser of the server's media options, from which it creates a media reader for each model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from server.config.server_config import ServerConfig
from server.http.offload import Offload
from server.media.fetch import AllowedHosts, Fetcher
from server.media.limits import MODALITIES, MediaLimits, read_counts, read_io_kwargs, read_object
from server.media.processor import Processor, ProcessorError
from server.media.reader import MediaReader, NoMedia
from server.media.source import Sources

logger = logging.getLogger("oneloop.load")
THREADS = 4  # one of which is left to what is small, and nothing here is
MAX_ITEMS = 16
T = TypeVar("T")


class MediaOptions:
    """Parsed media options of a server. Raises ValueError with the option's name if an option is invalid."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        counts = _read("--limit-mm-per-prompt", config.limit_mm_per_prompt, read_counts)
        try:
            self._hosts = AllowedHosts(config.allowed_media_domains)
        except ValueError as error:
            raise ValueError(f"--allowed-media-domains: {error}") from None
        self._limits = MediaLimits(
            max_items={**dict.fromkeys(MODALITIES, MAX_ITEMS), **counts},
            max_bytes=config.max_media_size,
            max_pixels=config.max_image_pixels,
            max_seconds=config.max_media_seconds,
        )
        self._io_kwargs = _read("--media-io-kwargs", config.media_io_kwargs, read_io_kwargs)
        self._processor_kwargs = _read("--mm-processor-kwargs", config.mm_processor_kwargs, read_object)

    def reader(
        self, folder: Path, model_config: Mapping[str, Any], modalities: frozenset[str]
    ) -> MediaReader | NoMedia:
        """Return a media reader for the model in `folder`, which supports `modalities`. If its processor cannot be loaded, log
        the reason and return NoMedia: the model then serves text only. Raises ValueError if the processor rejects
        --mm-processor-kwargs."""
        if not modalities:
            return NoMedia()
        try:
            processor = Processor.load(folder, model_config)
        except ProcessorError as error:
            logger.warning("text only: %s", error)
            return NoMedia(str(error))
        reader = self.reader_of(processor, modalities)
        for modality, why in reader.probe().items():
            if self._processor_kwargs:
                raise ValueError(f"--mm-processor-kwargs: the model's processor fails for {modality} with them: {why}")
            logger.warning("%s disabled: the model's processor fails: %s", modality, why)
        if not reader.modalities:
            return NoMedia("the model's processor fails, as the server's log says")
        logger.info("accepts %s besides text", ", ".join(sorted(reader.modalities)))
        if missing := sorted(modalities - processor.modalities):
            logger.warning(
                "%s disabled: a package that the model's processor needs is not installed", ", ".join(missing)
            )
        return reader

    def reader_of(
        self, processor: Processor, modalities: frozenset[str], fetcher: Fetcher | None = None
    ) -> MediaReader:
        config, limits = self._config, self._limits
        fetcher = fetcher or Fetcher(self._hosts, max_bytes=limits.max_bytes, timeout_s=config.media_fetch_timeout)
        return MediaReader(
            processor,
            modalities,
            Sources(fetcher, config.allowed_local_media_path, limits.max_bytes),
            Offload(threads=THREADS, name="media"),
            limits,
            io_kwargs=self._io_kwargs,
            processor_kwargs=self._processor_kwargs,
            cache_bytes=int(config.mm_processor_cache_gb * 1024**3),
            max_held_bytes=int(config.max_media_memory_gb * 1024**3),
            is_shared=config.shared_prefix_cache,
            takes_embeds=config.enable_mm_embeds,
        )


def _read(flag: str, given: str | None, read: Callable[[str], T]) -> T:
    try:
        return read("{}" if given is None else given)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
