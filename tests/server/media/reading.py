"""Readers of media for tests: over tiny processors, and loaded models that have one."""

from __future__ import annotations

import dataclasses
from typing import Any

from server.config.server_config import ServerConfig
from server.generate.encode import EncodedPrompts, encode_prompt
from server.generate.request import Chat, ChatMessage, Content, GenerateRequest
from server.http.call import Call
from server.http.offload import Offload
from server.media.fetch import Fetcher
from server.media.media_options import MediaOptions
from server.media.part import Given, MediaPart
from server.media.processor import Processor
from server.media.reader import MediaReader
from server.models.chat_format import ChatFormat
from server.models.defaults import sampling_defaults
from server.models.model import LoadedModel
from server.models.prompt import ChatTemplate
from server.models.tokenizer import Tokenizer
from tests.fakes import FakeEngine, fake_model
from tests.server.media.processors import Tiny
from tests.server.tiny import loaded_model

ALL = frozenset({"image", "audio", "video"})


def reader(tiny: Tiny, fetcher: Fetcher | None = None, **options: Any) -> MediaReader:
    made = MediaOptions(ServerConfig(**options))
    return made.reader_of(Processor.load(tiny.folder, tiny.config), ALL, fetcher)


def seeing(tiny: Tiny, **options: Any) -> LoadedModel:
    """A model that sees with this processor, and says what it was told."""
    tokenizer = Tokenizer.from_folder(tiny.folder)
    media = reader(tiny, **options)
    model = fake_model(vocab_size=tokenizer.vocab_size, modalities=media.modalities)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens)
    loaded = loaded_model(FakeEngine(model=model), tokenizer, template, sampling_defaults(), ("tiny",), ChatFormat())
    return dataclasses.replace(loaded, media=media)


def part(value: Any, modality: Any = "image") -> MediaPart:
    return MediaPart(modality, Given(value), "where", "image_url")


async def prompt(loaded: LoadedModel, *contents: Content, **options: Any) -> EncodedPrompts:
    """Of a conversation of users."""
    offload = Offload()
    try:
        messages = [ChatMessage(role="user", content=content) for content in contents]
        request = GenerateRequest(prompt=Chat(messages=messages, **options))
        return await encode_prompt(request.prompt, request, loaded, Call(offload=offload), ServerConfig())
    finally:
        offload.close()
