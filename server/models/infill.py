"""Fill in the middle: prompt formats with which a model writes the text between a prefix and a suffix.

Each model family has its own special tokens and order. A tokenizer that contains a family's tokens belongs to the family; a GGUF
file can also name the tokens. Texts are encoded one by one, and the special tokens are inserted between them by id. Sources: the
model cards of StarCoder2, Qwen2.5-Coder, CodeGemma, DeepSeek-Coder and Seed-Coder, the CodeLlama paper, mistral-common's
`encode_fim`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from server.models.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]  # without special tokens around the text

_JOIN: Final = (
    "☺"  # Meta's own: stands before a text that must not begin with sentencepiece's space, and is cut off again
)


@dataclass(frozen=True, slots=True)
class _Family:
    """Special tokens of a model family, as strings. `middle` None: the prompt ends with the prefix text. `repo`, `file`: tokens
    before other files. `ends`: further tokens that end an answer. `joined`: the suffix begins without sentencepiece's space."""

    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False
    repo: str | None = None
    file: str | None = None
    ends: tuple[str, ...] = ()
    joined: bool = False


_FAMILIES: Final = (
    _Family(  # Qwen2.5-Coder, CodeGemma, Granite 4
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", repo="<|repo_name|>", file="<|file_sep|>",
        ends=("<|fim_pad|>", "<|file_separator|>"),
    ),
    _Family(  # StarCoder and StarCoder2, Granite Code
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", repo="<repo_name>", file="<file_sep>",
        ends=("<fim_pad>", "<reponame>", "<filename>"),
    ),
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),  # SantaCoder
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder: the hole is between prefix and suffix
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",), joined=True),  # CodeLlama
    _Family("<PRE>", "<SUF>", "<MID>", ends=("<EOT>",), joined=True),
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    _Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Family("[PREFIX]", "[SUFFIX]", None, suffix_first=True, joined=True),  # Codestral
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """Token ids of a model's format; see `_Family` for the names. `stop_ids`: additional tokens that end an answer."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool = False
    repo: int | None = None
    file: int | None = None
    joined: bool = False
    stop_ids: frozenset[int] = frozenset()

    def ids(
        self,
        encode: Encode,
        prefix: Sequence[int],
        suffix: str,
        *,
        extra: Sequence[tuple[str, str]] = (),
        middle: str = "",
    ) -> list[int]:
        """Return the prompt's token ids. `prefix`: token ids. `extra`: other files, as (name, text). `middle`: start of the
        answer."""
        before, after = [self.prefix, *prefix], [self.suffix, *self._suffix_ids(encode, suffix)]
        found = self._extra_ids(encode, extra)
        found += [*after, *before] if self.suffix_first else [*before, *after]
        if self.middle is not None:
            found.append(self.middle)
        return found + (encode(middle) if middle else [])

    def _suffix_ids(self, encode: Encode, text: str) -> list[int]:
        head = encode(_JOIN) if self.joined else []
        ids = encode(_JOIN + text) if head else []
        return ids[len(head) :] if head and ids[: len(head)] == head else encode(text)

    def _extra_ids(self, encode: Encode, extra: Sequence[tuple[str, str]]) -> list[int]:
        """Return the token ids of other files, in llama.cpp's order (Qwen2.5-Coder, StarCoder2). Without file tokens: plain
        text."""
        if not extra:
            return []
        if self.repo is None or self.file is None:
            return [id for _, text in extra for id in encode(text + "\n")]
        found = [self.repo, *encode("myproject\n")]
        for name, text in extra:
            found += [self.file, *encode(f"{name}\n{text}\n")]
        return [*found, self.file, *encode("filename\n")]


def infill_format(tokenizer: Tokenizer) -> InfillFormat | None:
    """Return the fill-in-the-middle format of `tokenizer`, or None if it does not have one."""
    named = tokenizer.infill_ids
    if "fim_pre" in named and "fim_suf" in named:
        return _named(named, tokenizer)
    for family in _FAMILIES:
        found = _of_family(family, tokenizer)
        if found is not None:
            return found
    return None


def _of_family(family: _Family, tokenizer: Tokenizer) -> InfillFormat | None:
    prefix, suffix = tokenizer.id_of(family.prefix), tokenizer.id_of(family.suffix)
    middle = None if family.middle is None else tokenizer.id_of(family.middle)
    if prefix is None or suffix is None or (middle is None and family.middle is not None):
        return None
    repo, file = (None if text is None else tokenizer.id_of(text) for text in (family.repo, family.file))
    ends = tokenizer.ids_of(family.ends) | {prefix, suffix} | ({middle, repo, file} - {None})
    stop_ids = frozenset(id for id in ends if id is not None)
    return InfillFormat(prefix, suffix, middle, family.suffix_first, repo, file, family.joined, stop_ids)


def _named(named: Mapping[str, int], tokenizer: Tokenizer) -> InfillFormat:
    """Return the format with the tokens that a GGUF file names. Their order is that of the family with this prefix token."""
    prefix, suffix, middle = named["fim_pre"], named["fim_suf"], named.get("fim_mid")
    family = next((one for one in _FAMILIES if tokenizer.id_of(one.prefix) == prefix), None)
    return InfillFormat(
        prefix,
        suffix,
        None if family is not None and family.middle is None else middle,
        suffix_first=family is not None and family.suffix_first,
        repo=named.get("fim_rep"),
        file=named.get("fim_sep"),
        joined=family is not None and family.joined,
        stop_ids=frozenset(named.values()) | (frozenset() if family is None else tokenizer.ids_of(family.ends)),
    )
