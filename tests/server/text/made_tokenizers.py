"""Tokenizers for tests: small ones of every decoder family, trained here, and the built-in model's own."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It wasn't 12 dogs, it was 345!",
    "def f(x):\n    return x ** 2  # squared\n\n\nfor i in range(10):\n\tprint(f(i))\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "親譲りの無鉄砲で小供の時から損ばかりしている。 我是中国人 한국어 텍스트",
    "emoji 😀😃 👩‍👩‍👧‍👦 🇩🇪 combining e\u0301 a\u0308\u0323 नमस्ते ไทย",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(vocab_size: int = 600) -> Tokenizer:
    """GPT-2's kind, with a special token, an added one and an added one outside the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [
            AddedToken("<think>", normalized=False),
            AddedToken("｜ end ｜", normalized=False),
            AddedToken("é", normalized=False),
        ]
    )
    return tokenizer


def _sentencepiece(decoder: list[Any], normalizer: list[Any]) -> Tokenizer:
    seed = Tokenizer(models.BPE())
    seed.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, limit_alphabet=60)
    seed.train_from_iterator(CORPUS, trainer)
    learned = sorted(seed.get_vocab(), key=lambda token: seed.token_to_id(token))
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, "<0x4>", *learned]
    ids = {token: id for id, token in enumerate(tokens)}
    merges = [
        (token[:at], token[at:])
        for token in learned
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([*normalizer, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(decoder)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("  indent", normalized=False)])
    return tokenizer


def llama_like() -> Tokenizer:
    """Llama 2's decoder: Replace, ByteFallback, Fuse, Strip."""
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(decoder, [normalizers.Prepend("▁")])


def gemma_like() -> Tokenizer:
    return _sentencepiece([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()], [])


def strip_three() -> Tokenizer:
    """Several leading characters may be cut, over several tokens."""
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    return _sentencepiece(decoder, [])


def bytes_before_metaspace() -> Tokenizer:
    """An arrangement that cannot be followed token by token."""
    return _sentencepiece([decoders.ByteFallback(), decoders.Metaspace()], [])


def metaspace(scheme: str = "always") -> Tokenizer:
    """T5's and XLM-R's decoder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], show_progress=False)
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT's decoder, which also mends punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    special = ["[UNK]", "[SEP]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    return tokenizer


def word_suffix() -> Tokenizer:
    """CLIP's decoder: the last token of a text is treated differently."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=400, end_of_word_suffix="</w>", special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def no_decoder() -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: id for id, word in enumerate(["zero", "one", "two", "three", "four"])}, unk_token="zero"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


MADE = {
    "byte level": byte_level,
    "llama like": llama_like,
    "gemma like": gemma_like,
    "strip three": strip_three,
    "metaspace always": metaspace,
    "metaspace never": functools.partial(metaspace, "never"),
    "wordpiece": wordpiece,
    "no decoder": no_decoder,
    "bytes before metaspace": bytes_before_metaspace,
    "word suffix": word_suffix,
}


@functools.cache
def made(name: str) -> Tokenizer:
    return MADE[name]()
