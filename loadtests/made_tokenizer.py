"""Generator of a byte-level BPE tokenizer with a chat template and a vocabulary of any size. It is used for models without
weights on machines that have neither a tokenizer nor a network. A token is about three letters, a word about two tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")  # the first ids; the bytes follow
SPACE = "\u0120"  # as a byte-level vocabulary writes it
MIN_SIZE, MAX_SIZE = len(SPECIAL) + 256, 400_000
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_STRIDE = 7  # of the pairs of pairs, of which only some have room: each begins with another letter then
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_letters() -> list[str]:
    """Return the character that stands for each byte. Printable bytes stand for themselves; the others use U+0100 and following."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _merges() -> Iterator[tuple[str, str]]:
    """Yield merges, each once: pairs of letters (a space may be first), then a pair and a letter, then two pairs."""
    pairs = ["".join(each) for each in product([SPACE, *LETTERS], LETTERS)]
    yield from ((pair[0], pair[1]) for pair in pairs)
    yield from product(pairs, LETTERS)
    quads = list(product(pairs, pairs[len(LETTERS) :]))  # no space within
    for start in range(_STRIDE):
        yield from quads[start::_STRIDE]


def check_size(vocab_size: int) -> None:
    """Raise ValueError if a vocabulary of `vocab_size` tokens is too small (all bytes) or too large (tokens of four letters)."""
    if not MIN_SIZE <= vocab_size <= MAX_SIZE:
        raise ValueError(f"vocabulary size {vocab_size} must be from {MIN_SIZE} to {MAX_SIZE}")


def write_tokenizer(folder: Path, vocab_size: int, last: Sequence[str] = ()) -> None:
    """Write tokenizer.json and tokenizer_config.json in the format of transformers. `last`: special tokens at the end of the
    vocabulary. Raises OSError, ValueError."""
    num_text = vocab_size - len(last)
    check_size(num_text)
    letters = byte_letters()
    merges = list(islice(_merges(), num_text - MIN_SIZE))
    special = [*enumerate(SPECIAL), *enumerate(last, num_text)]
    tokens = [*SPECIAL, *letters, *("".join(merge) for merge in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    written = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": number, "content": token, **added} for number, token in special],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [list(merge) for merge in merges],
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(written))
    facts = {"eos_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
