"""A tokenizer one can count by hand: every byte is a token, three special tokens stand in front, and a ChatML template."""

from __future__ import annotations

from functools import lru_cache

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from runtime.api import EngineClient, SamplingParams
from server.generate.structured.compiler import Grammars
from server.models.chat_format import ChatFormat
from server.models.model import LoadedModel
from server.models.prompt import ChatTemplate
from server.models.tokenizer import Tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|eos|>")
START, END, EOS = range(3)
VOCAB_SIZE = 3 + 256

CHATML = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ assistant or 'assistant' }}\n{% endif %}"
)


def tiny_tokenizer(*more_special: str, chat_template: str = CHATML) -> Tokenizer:
    """`more_special`: further special tokens, behind all others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: 3 + i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # Ids of added tokens follow the model's vocabulary unless it has them already.
    vocab = {**{token: i for i, token in enumerate(SPECIAL)}, **{char: 3 + i for i, char in enumerate(alphabet)}}
    backend.model = models.BPE(vocab=vocab, merges=[])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *more_special)]
    )
    return Tokenizer(backend, {"eos_token": SPECIAL[EOS]}, chat_template)


@lru_cache(maxsize=8)  # a tokenizer and its template stay as they are
def chatml(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens)


def loaded_model(
    engine: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    defaults: SamplingParams,
    names: tuple[str, ...],
    chat_format: ChatFormat | None = None,
) -> LoadedModel:
    """With grammars as the composition root makes them, not warmed."""
    grammars = Grammars(tokenizer, engine.model.eos_token_ids)
    return LoadedModel(engine, tokenizer, template, defaults, names, chat_format or ChatFormat(), grammars=grammars)
