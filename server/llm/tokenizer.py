"""The model's tokenizer as the transformers package has it, for programs that were written for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from server.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def as_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A copy: what is done to it changes nothing here."""
    from transformers import PreTrainedTokenizerFast  # half a second that only those pay who want it

    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # not typed
    made = make(tokenizer_object=tokenizer.backend, **tokenizer.named_tokens)
    made.chat_template = tokenizer.chat_template
    return made
