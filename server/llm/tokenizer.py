"""The model's tokenizer as a transformers object, for programs that use transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from server.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def as_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a copy of `tokenizer` as a transformers tokenizer. Changes to the copy do not affect the engine."""
    from transformers import PreTrainedTokenizerFast  # imported on demand: takes half a second

    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # not typed
    made = make(tokenizer_object=tokenizer.backend, **tokenizer.named_tokens)
    made.chat_template = tokenizer.chat_template
    return made
