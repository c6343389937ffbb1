"""Models that pool, as tests want them: a tokenizer that frames texts as BERT's do, and what such models say of themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokenizers.processors import TemplateProcessing

from runtime.api import PoolerInfo
from server.models.tokenizer import Tokenizer
from tests.server.tiny import tiny_tokenizer

EMBEDDER = PoolerInfo(embedding_size=8, pooling="mean")
MATRYOSHKA = PoolerInfo(embedding_size=8, pooling="cls", matryoshka_dimensions=(2, 4))
RERANKER = PoolerInfo(embedding_size=8, labels=("LABEL_0",), activation="sigmoid", num_token_types=2)
CLASSIFIER = PoolerInfo(embedding_size=8, labels=("good", "bad", "ugly"), activation="softmax")
CLS, SEP = 259, 260


def framing_tokenizer() -> Tokenizer:
    """Every byte is a token; [CLS] text [SEP], and [CLS] one [SEP] other [SEP] with the types 0 and 1."""
    made = tiny_tokenizer("[CLS]", "[SEP]")
    made.backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return Tokenizer(made.backend, {"cls_token": "[CLS]", "sep_token": "[SEP]"})


def bytes_of(text: str) -> list[int]:
    """The ids of `text` between what frames it."""
    return tiny_tokenizer().encode(text)


def means_of(ids: Sequence[int], size: int) -> list[float]:
    """What the fake makes of `ids`, without the normalisation."""
    pairs = list(zip(ids, [1, *ids], strict=False))
    return [sum((pair[place % 2] + place) for pair in pairs) / len(ids) for place in range(size)]


def normalised(numbers: Sequence[float]) -> list[float]:
    length = math.hypot(*numbers)
    return [number / length for number in numbers]
