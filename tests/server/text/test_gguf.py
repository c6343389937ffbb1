"""GGUF tokenizers: sentencepiece's merging from scores, pre-tokenizers by name, and clear errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from server.text.gguf import PRE_TOKENIZERS, TokenizerError, Vocabulary, build_backend
from tests.server.text.made_tokenizers import BYTE_TOKENS, CORPUS, made

CONTROL, UNKNOWN, NORMAL, USER, BYTE = 3, 2, 1, 4, 6


def metadata(**fields: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Llama 2's layout: control tokens, bytes, then pieces by falling score, single characters last."""
    learned = [
        token for token in made("gemma like").get_vocab() if token not in {"<unk>", "<s>", "</s>", "<0x4>", "  indent"}
    ]
    learned = sorted(
        set(learned) - set(BYTE_TOKENS), key=lambda token: (len(token) == 1, made("gemma like").token_to_id(token))
    )
    learned += ["  ", "    ", "<b>"]
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *learned]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(learned) - 3), USER, USER, USER]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(learned))]
    return metadata(
        model="llama", tokens=tokens, token_type=types, scores=scores,
        bos_token_id=1, eos_token_id=2, unknown_token_id=0, add_bos_token=False,
    ) | metadata(**changes)  # fmt: skip


@functools.cache
def sentencepiece(add_space_prefix: bool) -> Tokenizer:
    return build_backend(Vocabulary.read(sentencepiece_metadata(add_space_prefix=add_space_prefix)))


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Sentencepiece's BPE as its paper and code define it: join the neighbours that make the best piece, the leftmost of
    equals; what is no piece in the end is spelled in bytes."""
    pieces = list(text)
    while True:
        made_here = [(scores.get(left + right), -at) for at, (left, right) in enumerate(itertools.pairwise(pieces))]
        candidates = [(score, at) for score, at in made_here if score is not None]
        if not candidates:
            break
        at = -max(candidates)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        token
        for piece in pieces
        for token in ([piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()])
    ]


words = st.lists(st.sampled_from([*" ".join(CORPUS).split(), " ", "  ", "\n", "é", "字", "x1"]), max_size=8)


@given(text=st.one_of(words.map(" ".join), st.text(max_size=20)))
def test_merges_made_from_scores_cut_text_as_sentencepiece_does(text):
    fields = sentencepiece_metadata()
    plain = zip(
        fields["tokenizer.ggml.tokens"],
        fields["tokenizer.ggml.scores"],
        fields["tokenizer.ggml.token_type"],
        strict=True,
    )
    scores = {token.replace(" ", "▁"): score for token, score, type_ in plain if type_ == NORMAL or token.strip() == ""}
    tokens = sentencepiece(add_space_prefix=False).encode(text).tokens
    if "<b>" not in text and not any(token in text for token in ("<s>", "</s>", "<unk>")):
        assert tokens == merged_by_score(text.replace(" ", "▁"), scores)


@given(text=st.text(max_size=20))
def test_sentencepiece_text_comes_back_as_it_was(text):
    if not any(token in text for token in ("<s>", "</s>", "<unk>", "▁")):
        for add_space_prefix in (False, True):
            backend = sentencepiece(add_space_prefix)
            assert backend.decode(backend.encode(text).ids) == text


def test_the_space_prefix_stands_before_the_text_and_behind_special_tokens():
    assert "".join(sentencepiece(add_space_prefix=True).encode("d</s>d").tokens) == "▁d</s>▁d"
    assert "".join(sentencepiece(add_space_prefix=False).encode("d</s>d").tokens) == "d</s>d"


def test_user_defined_tokens_stay_whole_and_are_no_special_ones():
    backend = sentencepiece(add_space_prefix=False)
    ids = backend.encode("a<b></s>").ids
    assert [backend.id_to_token(id) for id in ids] == ["a", "<b>", "</s>"]
    assert backend.decode(ids) == "a<b>"


def test_runs_of_spaces_are_pieces_though_the_file_spells_them_with_spaces():
    backend = sentencepiece(add_space_prefix=False)
    ids = backend.encode("    a").ids
    assert backend.decode(ids) == "    a"
    assert backend.token_to_id("▁▁") == sentencepiece_metadata()["tokenizer.ggml.tokens"].index("  ")


def test_gemma_merges_in_the_order_of_its_pieces_whatever_their_scores():
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]
    fields = metadata(
        model="llama", tokens=tokens, scores=[0, 0, 0, 0, -9, -1], token_type=[2, 1, 1, 1, 1, 1], add_space_prefix=False
    )
    assert build_backend(Vocabulary.read(fields)).encode("abc").tokens == ["a", "bc"]
    fields["general.architecture"] = "gemma3"
    assert build_backend(Vocabulary.read(fields)).encode("abc").tokens == ["ab", "c"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"add_bos_token": True}, ["BOS", "d"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["BOS", "d", "EOS"]),
        ({"add_bos_token": False}, ["d"]),
        ({"add_bos_token": None}, ["BOS", "d"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(changes, expected):
    backend = build_backend(Vocabulary.read(sentencepiece_metadata(add_space_prefix=False, **changes)))
    encoding = backend.encode("d")
    names = {1: "BOS", 2: "EOS", backend.token_to_id("d"): "d"}
    assert [names[id] for id in encoding.ids] == expected
    assert backend.encode("d", add_special_tokens=False).ids == [backend.token_to_id("d")]


# --- byte-level ---------------------------------------------------------------------------------------------------


def byte_level_metadata(pre: str | None, **changes: Any) -> dict[str, Any]:
    """The byte alphabet, " the" in its pieces, and one token that no merge makes."""
    source = made("byte level")
    alphabet = [token for token in source.get_vocab() if len(token) == 1]
    tokens = ["<|end|>", *alphabet, "th", "Ġth", "Ġthe", "zq"]
    merges = ["t h", "Ġ th", "Ġth e"]
    types = [CONTROL, *[NORMAL] * (len(tokens) - 1)]
    return metadata(model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=merges, bos_token_id=0) | metadata(
        **changes
    )


def parts(pre: str, text: str) -> list[str]:
    splitter = build_backend(Vocabulary.read(byte_level_metadata(pre))).pre_tokenizer
    bounds = [span for _, span in splitter.pre_tokenize_str(text)]
    return [text[start:stop] for start, stop in bounds]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "x =  12\n\n3", ["x", " =", "  ", "1", "2", "\n\n", "3"]),
        ("gpt-2", "x =  12\n\n3 don't", ["x", " =", " ", " 12", "\n", "\n", "3", " don", "'t"]),
        ("llama-bpe", "DON'T 12345!\n\n  x", ["DON", "'T", " ", "123", "45", "!\n\n", " ", " x"]),
        ("qwen2", "DON'T 123!\n  x", ["DON", "'T", " ", "1", "2", "3", "!\n", " ", " x"]),
        ("qwen35", "नमस्ते 12", ["नमस्ते", " ", "1", "2"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-v3", "漢字ab 1234!x", ["漢字", "ab", " ", "123", "4", "!x"]),
        ("deepseek-coder", "ab 12\n!", ["ab", " ", "1", "2", "\n", "!"]),
        ("falcon", "ab!! 12345", ["ab", "!!", " ", "123", "45"]),
    ],
)
def test_pre_tokenizers_cut_as_their_families_do(pre, text, expected):
    assert parts(pre, text) == expected


@pytest.mark.parametrize("name", [name for row in PRE_TOKENIZERS for name in row.names])
def test_every_named_pre_tokenizer_keeps_every_character(name):
    text = "It's  a\ttest…\r\n\n 1234 親譲り नमस्ते 😀 HelloWorld (x+y)*2  "
    assert "".join(parts(name, text)) == text


def test_no_pre_tokenizer_is_named_twice():
    names = [name for row in PRE_TOKENIZERS for name in row.names]
    assert len(names) == len(set(names))


def tokens_of(text: str, fields: dict[str, Any]) -> Sequence[str]:
    return build_backend(Vocabulary.read(fields)).encode(text, add_special_tokens=False).tokens


def test_whole_words_skip_the_merges_only_where_the_family_says_so():
    assert tokens_of("zq the", byte_level_metadata("llama-bpe")) == ["zq", "Ġthe"]
    assert tokens_of("zq the", byte_level_metadata("qwen2")) == ["z", "q", "Ġthe"]


def test_a_file_without_a_pre_tokenizer_is_cut_like_gpt2():
    assert tokens_of(" the", byte_level_metadata(None)) == ["Ġthe"]


def test_bos_is_the_familys_habit_where_the_file_says_nothing():
    def starts(fields):
        return build_backend(Vocabulary.read(fields)).encode("t").ids[0] == 0

    assert starts(byte_level_metadata("llama-bpe"))
    assert not starts(byte_level_metadata("llama-bpe", add_bos_token=False))
    assert not starts(byte_level_metadata("qwen2"))
    assert starts(byte_level_metadata("qwen2", add_bos_token=True))


def test_control_tokens_outside_the_byte_alphabet_keep_their_ids():
    fields = byte_level_metadata("deepseek-v3")
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "<｜end▁of▁text｜>"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], CONTROL]
    backend = build_backend(Vocabulary.read(fields))
    last = len(fields["tokenizer.ggml.tokens"]) - 1
    ids = backend.encode("t<｜end▁of▁text｜>").ids
    assert ids[-1] == last
    assert backend.get_vocab_size() == last + 1
    assert backend.decode(ids, skip_special_tokens=False) == "t<｜end▁of▁text｜>"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "carries no tokenizer"),
        (byte_level_metadata("qwen2", model="rwkv"), "unknown GGUF tokenizer 'rwkv'.*known: gpt2, llama"),
        (byte_level_metadata("martian"), "unknown pre-tokenizer 'martian'.*known: .*smollm"),
        (byte_level_metadata("qwen2", merges=None), "needs tokenizer.ggml.merges"),
        (byte_level_metadata("qwen2", merges=["t nowhere"]), "rejects"),
        (byte_level_metadata("qwen2", token_type=[1]), "token_type has 1 entries"),
        (byte_level_metadata("qwen2", scores=[0.5]), "scores has 1 entries"),
        (byte_level_metadata("qwen2", bos_token_id=10**6), "bos_token_id is 1000000"),
        (byte_level_metadata("qwen2", eos_token_id="two"), "eos_token_id is two"),
        (byte_level_metadata("qwen2", tokens=[1, 2]), "tokens is not a list of str"),
        (byte_level_metadata("qwen2", merges=7), "merges is not a list of str"),
    ],
)
def test_what_cannot_be_built_says_why(fields, says):
    with pytest.raises(TokenizerError, match=says):
        build_backend(Vocabulary.read(fields))
