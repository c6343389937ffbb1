"""The tokenizer that is made up: read by the library that servers read it with."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from loadtests.made_tokenizer import SPECIAL, byte_letters, write_tokenizer
from loadtests.words import WORDS


@pytest.mark.parametrize("vocab_size", [259, 1_000, 49_152])
def test_every_id_is_a_token_of_its_own_and_any_text_comes_back(tmp_path, vocab_size):
    write_tokenizer(tmp_path, vocab_size)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    text = "The river stood near a doctor's garden. \u00dcber 5 \u20ac\n\n\u6f22\u5b57 \U0001f642"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(tokenizer.decode([number]) for number in range(len(SPECIAL), vocab_size))


def test_words_are_a_few_tokens_each(tmp_path):
    write_tokenizer(tmp_path, 49_152)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert len(tokenizer.encode(" ".join(WORDS)).ids) < 3 * len(WORDS)


def test_the_template_is_one_of_chats_and_the_end_is_known(tmp_path):
    write_tokenizer(tmp_path, 300)
    facts = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert facts["eos_token"] == SPECIAL[0]
    assert all(token in facts["chat_template"] for token in SPECIAL[1:])


def test_bytes_are_written_as_byte_level_vocabularies_write_them():
    assert (byte_letters()[ord("a")], byte_letters()[ord(" ")], byte_letters()[ord("\n")]) == ("a", "\u0120", "\u010a")
    assert len(set(byte_letters())) == 256


@pytest.mark.parametrize("vocab_size", [258, 600_000])
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path, vocab_size):
    with pytest.raises(ValueError, match=f"vocabulary size {vocab_size}"):
        write_tokenizer(tmp_path, vocab_size)
