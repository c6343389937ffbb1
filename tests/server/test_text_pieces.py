"""Long texts tokenised in pieces: the ids of the whole, wherever a tokenizer lets a text be cut, and no more work than wanted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from server.http.offload import to_the_end
from server.models import tokenizer
from server.models.tokenizer import TextPieces, Tokenizer, TooManyTokens
from tests.server import smollm2
from tests.server.test_tokenizer import HARD
from tests.server.text.made_tokenizers import MADE, byte_level, made

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama 3": rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}",
    "qwen": rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}  # fmt: skip


def splitting(pattern: str) -> Backend:
    """The byte-level tokenizer, which takes its words by `pattern`, as those of the families do."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.normalizer = normalizers.NFC()
    return backend


def deepseek() -> Backend:
    backend = splitting(WORDS["qwen"])
    splits = [
        pre_tokenizers.Split(Regex(p), "isolated") for p in (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", WORDS["llama 3"])
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


BACKENDS = {
    **MADE, **{name: lambda pattern=pattern: splitting(pattern) for name, pattern in WORDS.items()}, "deepseek": deepseek
}  # fmt: skip
CUT = {"byte level", *WORDS, "deepseek", "wordpiece", "word suffix", "no decoder"}
TOKENIZERS = {name: Tokenizer(make(), {}) for name, make in BACKENDS.items()}
PARTS = st.sampled_from(
    ["\n", " ", "  ", "\t", "a", "word", "The", "'s", "12", "345", "1", ".", "!?", "é", "e\u0301", "漢字", "😀", "\r\n", "<think>",
     "<|end|>", "<", "\u200d", "İ", "ﬁ", "_", "Ａ", "\u00a0", "\u2028"]
)  # fmt: skip
TEXTS = st.lists(PARTS, max_size=60).map("".join)


@pytest.fixture
def pieces_of(monkeypatch):
    """`pieces_of(n)`: from then on pieces are cut after that many characters."""

    def cut(num_chars: int) -> None:
        monkeypatch.setattr(tokenizer, "PIECE_CHARS", num_chars)

    return cut


def test_which_tokenizers_let_a_text_be_cut():
    text = "some words\n" * 10_000
    cut = {name for name, make in BACKENDS.items() if len([*TextPieces(make()).ends(text)]) > 1}
    assert cut == CUT


@pytest.mark.parametrize("name", BACKENDS)
@given(text=TEXTS, num_chars=st.integers(1, 20))
def test_pieces_give_the_ids_of_the_whole(name, text, num_chars):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_CHARS", num_chars)
        assert to_the_end(TOKENIZERS[name].encode_pieces(text)) == TOKENIZERS[name].encode(text)


def test_smollm2_too(pieces_of):
    ours, text = smollm2.ours(), "\n".join(HARD)
    expected = ours.encode(text)
    for num_chars in (1, 7, 50, 300):
        pieces_of(num_chars)
        assert len([*ours._pieces.ends(text)]) > 2
        assert to_the_end(ours.encode_pieces(text)) == expected


def test_what_stands_around_a_text_stands_there_once(pieces_of):
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<|end|> $A <|end|>", special_tokens=[("<|end|>", 0)])
    ours = Tokenizer(backend, {"bos_token": "<|end|>"})
    pieces_of(5)
    for text in ("some words and words", "<|end|>some words and words"):
        expected = ours.encode(text)
        assert expected.count(0) == 2
        assert to_the_end(ours.encode_pieces(text)) == expected
        assert to_the_end(ours.encode_pieces(text, False)) == ours.encode(text, False)


@pytest.mark.parametrize("name", ["byte level", "llama like"])
def test_no_more_of_a_text_is_tokenised_than_its_bound(pieces_of, name):
    pieces_of(100)
    ours = TOKENIZERS[name]
    text = "nothing but words " * 10_000
    steps = ours.encode_pieces(text, max_tokens=500)
    num_pieces = 0
    with pytest.raises(TooManyTokens) as caught:  # noqa: PT012
        for _ in steps:
            num_pieces += 1
    assert num_pieces < 100
    assert caught.value.num_chars < 10_000
    fits = to_the_end(ours.encode_pieces(text[:900], max_tokens=900))
    assert fits == ours.encode(text[:900])


def test_added_tokens_that_reach_over_a_place_forbid_it():
    for token, options in (("two words", {}), ("end", {"rstrip": True})):
        from tokenizers import AddedToken

        backend = made("byte level").from_str(made("byte level").to_str())
        backend.add_tokens([AddedToken(token, normalized=False, **options)])
        assert [*TextPieces(backend).ends("some words\n" * 10_000)] == [110_000]
