"""Responses of llama.cpp's /props and /slots. A slot is reported for each sequence that can run, without its prompt."""

from __future__ import annotations

import dataclasses

from server.api.llamacpp.api_types import LlamaProps, LlamaSlot
from server.api.llamacpp.frames import settings
from server.config import __version__
from server.config.server_config import ServerConfig
from server.models.model import LoadedModel


def props(loaded: LoadedModel, config: ServerConfig) -> LlamaProps:
    model, tokenizer = loaded.engine.model, loaded.tokenizer
    params = dataclasses.replace(loaded.defaults, max_tokens=-1)
    return LlamaProps(
        default_generation_settings={
            "id": 0,
            "id_task": -1,
            "n_ctx": model.max_model_len,
            "speculative": False,
            "is_processing": False,
            "params": settings(loaded, params, (), stream=False),
        },
        total_slots=model.max_num_seqs,
        model_alias=loaded.name,
        model_path=config.model,
        chat_template=loaded.chat_template.source,
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        build_info=f"oneloop-{__version__}",
    )


def slots(loaded: LoadedModel) -> list[LlamaSlot]:
    """Return all slots. As many slots are busy as sequences are running."""
    model, num_running = loaded.engine.model, loaded.engine.health().num_running
    return [
        LlamaSlot(id=id, n_ctx=model.max_model_len, is_processing=id < num_running) for id in range(model.max_num_seqs)
    ]
