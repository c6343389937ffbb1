"""Builder of a tokenizer (of the tokenizers library) from the `tokenizer.ggml.*` metadata of a GGUF file.

Two kinds are supported. "gpt2" is byte-level BPE: the file contains the merges and the pre-tokenizer's name. "llama" is
sentencepiece BPE: its merges are derived from the pieces' scores. Token ids are those of the file; no token is added. Options
missing from GGUF files, such as text normalisation, are chosen by the pre-tokenizer's model family. This module does not depend
on files or templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

Metadata = Mapping[str, Any]


class TokenizerError(ValueError):
    """Error: a tokenizer is missing, broken or unsupported. The message is for the user who chose the model."""


class TokenType(IntEnum):
    """Token types in `tokenizer.ggml.token_type`, with sentencepiece's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# --- pre-tokenizers by name ---------------------------------------------------------------------------------------
#
# The expressions are those of the families' own tokenizer.json; llama.cpp (src/llama-vocab.cpp) gives them their names.

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)


def _cl100k(number: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_TEKKEN: Final = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_O200K: Final = (
    rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_DEEPSEEK_V3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)

DIGITS: Final = object()  # each digit alone
GPT2: Final = object()  # the expression built into the library's ByteLevel


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Pre-tokenizer of a GGUF file. `splits`: regular expressions that split the text one after another; each match becomes a
    part of its own. `whole_words`: a part that is a token is not split into bytes. `nfc`: text is first normalised to NFC.
    `bos`: prompts begin with BOS unless the file's metadata say otherwise."""

    names: tuple[str, ...]
    splits: tuple[object, ...]
    whole_words: bool = False
    nfc: bool = False
    bos: bool = False


PRE_TOKENIZERS: Final = (
    PreTokenizer(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), (DIGITS, GPT2)),
    PreTokenizer(("command-r",), (DIGITS, GPT2), nfc=True),
    PreTokenizer(
        ("default", "gpt2", "gpt-2", "phi-2", "jais", "trillion", "exaone4", "gigachat", "granite-docling"), (GPT2,)
    ),
    PreTokenizer(("mpt", "olmo"), (GPT2,), nfc=True),
    PreTokenizer(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        (_cl100k(r"\p{N}{1,3}"),),
        whole_words=True,
        bos=True,
    ),
    PreTokenizer(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_cl100k(r"\p{N}{1,3}"),)),
    PreTokenizer(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), (_cl100k(r"\p{N}"),), nfc=True),
    PreTokenizer(("stablelm2", "hunyuan", "grok-2"), (_cl100k(r"\p{N}"),)),
    PreTokenizer(("qwen35",), (_QWEN35,), nfc=True),
    PreTokenizer(("tekken",), (_TEKKEN,), whole_words=True, bos=True),
    PreTokenizer(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_O200K,)),
    PreTokenizer(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
    PreTokenizer(("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    PreTokenizer(("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
)
# Tokens that the metadata name by id: tokenizer.ggml.NAME_token_id.
NAMED: Final = ("bos", "eos", "unknown", "padding", "eot", "eom")
INFILL: Final = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")  # for filling in the middle
_BY_NAME: Final = {name: row for row in PRE_TOKENIZERS for name in row.names}


def _splitter(row: PreTokenizer) -> Any:
    steps: list[Any] = []
    for split in row.splits:
        if split is DIGITS:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif split is GPT2 and split is row.splits[-1]:
            return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
        else:
            steps.append(pre_tokenizers.Split(Regex(_GPT2 if split is GPT2 else str(split)), behavior="isolated"))
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# --- the file's vocabulary ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Checked tokenizer metadata of a GGUF file. `types` and `scores` have one entry per token in `tokens`."""

    kind: str  # tokenizer.ggml.model
    pre: str
    architecture: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str] | None
    named_ids: Mapping[str, int]  # of NAMED and INFILL, those the file gives
    add_bos: bool | None
    add_eos: bool
    add_space_prefix: bool

    @classmethod
    def read(cls, metadata: Metadata) -> Vocabulary:
        """Read the vocabulary from GGUF metadata. Raises TokenizerError if the metadata are incomplete or contradictory."""

        tokens = _list(metadata, "tokens", str)
        if not tokens:
            raise TokenizerError(
                "the GGUF file carries no tokenizer (tokenizer.ggml.tokens); give one with --tokenizer"
            )
        types = _list(metadata, "token_type", int) or [TokenType.NORMAL] * len(tokens)
        scores = _list(metadata, "scores", float, int) or [0.0] * len(tokens)
        for name, values in (("token_type", types), ("scores", scores)):
            if len(values) != len(tokens):
                raise TokenizerError(f"tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens")
        return cls(
            kind=str(metadata.get("tokenizer.ggml.model", "")),
            pre=str(metadata.get("tokenizer.ggml.pre") or "default"),
            architecture=str(metadata.get("general.architecture", "")),
            tokens=tokens,
            types=types,
            scores=scores,
            merges=_list(metadata, "merges", str),
            named_ids=_named_ids(metadata, len(tokens)),
            add_bos=metadata.get("tokenizer.ggml.add_bos_token"),
            add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
            add_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        )

    def of_type(self, *types: TokenType) -> list[str]:
        return [token for token, type_ in zip(self.tokens, self.types, strict=True) if type_ in types]


def _list(metadata: Metadata, name: str, *kinds: type) -> list[Any] | None:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is not None and not (isinstance(values, list) and all(isinstance(value, kinds) for value in values)):
        raise TokenizerError(f"tokenizer.ggml.{name} is not a list of {kinds[0].__name__}")
    return values or None


def _named_ids(metadata: Metadata, num_tokens: int) -> dict[str, int]:
    found = {}
    for name in (*NAMED, *INFILL):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
            raise TokenizerError(f"tokenizer.ggml.{name}_token_id is {token_id}; there are {num_tokens} tokens")
        found[name] = token_id
    return found


def build_backend(vocabulary: Vocabulary) -> Tokenizer:
    """Build the tokenizer. Raises TokenizerError if its kind or pre-tokenizer is unknown, or if merges do not match the tokens."""
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if vocabulary.kind not in builders:
        raise TokenizerError(
            f"unknown GGUF tokenizer {vocabulary.kind!r} (tokenizer.ggml.model); known: {', '.join(builders)}. "
            "Give the model's own tokenizer with --tokenizer"
        )
    try:
        return builders[vocabulary.kind](vocabulary)
    except TokenizerError:
        raise
    except Exception as error:  # the library has only this type for what it refuses
        raise TokenizerError(f"the tokenizers library rejects this GGUF tokenizer: {error}") from error


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    row = _BY_NAME.get(vocabulary.pre)
    if row is None:
        raise TokenizerError(
            f"unknown pre-tokenizer {vocabulary.pre!r} (tokenizer.ggml.pre); known: {', '.join(sorted(_BY_NAME))}. "
            "Give the model's own tokenizer with --tokenizer"
        )
    if vocabulary.merges is None:
        raise TokenizerError("a byte-level tokenizer needs tokenizer.ggml.merges")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    ids = {token: id for id, token in enumerate(vocabulary.tokens)}
    backend = Tokenizer(BPE(vocab=ids, merges=merges, ignore_merges=row.whole_words))
    if row.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _splitter(row)
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, vocabulary, vocabulary.of_type(TokenType.USER_DEFINED))
    _add_template(backend, vocabulary, add_bos=row.bos if vocabulary.add_bos is None else vocabulary.add_bos)
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    tokens = [_respelled(token) for token in vocabulary.tokens]
    ids = {token: id for id, token in enumerate(tokens)}
    unknown = vocabulary.named_ids.get("unknown")
    backend = Tokenizer(
        BPE(
            vocab=ids,
            merges=_merges_from_pieces(vocabulary, tokens, ids),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in vocabulary.types,
        )
    )
    to_pieces: list[Any] = [normalizers.Replace(" ", "▁")]
    to_text: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        to_pieces.insert(0, normalizers.Prepend("▁"))
        to_text.append(decoders.Strip(content=" ", left=1))
    backend.normalizer = normalizers.Sequence(to_pieces)
    backend.decoder = decoders.Sequence(to_text)
    user_defined = [token for token in vocabulary.of_type(TokenType.USER_DEFINED) if _respelled(token) == token]
    _add_tokens(backend, vocabulary, user_defined)
    # llama.cpp's files leave the flag out where sentencepiece's default, to begin with BOS, holds
    _add_template(backend, vocabulary, add_bos=True if vocabulary.add_bos is None else vocabulary.add_bos)
    return backend


def _respelled(token: str) -> str:
    """Replace each space of a token of spaces by "▁". The file contains real spaces, but merges are written with "▁"."""
    return "▁" * len(token) if token.strip(" ") == "" else token


def _merges_from_pieces(vocabulary: Vocabulary, tokens: Sequence[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges (left, right): every pair of pieces that forms a piece, best result first. Results are ordered by score
    or, for Gemma, by position, because Gemma's scores do not follow its merge order."""
    if vocabulary.merges is not None:
        return [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    plain = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    order = [id for id, type_ in enumerate(vocabulary.types) if type_ in plain and len(tokens[id]) > 1]
    if not vocabulary.architecture.startswith("gemma"):
        order.sort(key=lambda id: -vocabulary.scores[id])
    return [cut for id in order for cut in _cuts(tokens[id], ids)]


def _cuts(piece: str, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for at in range(1, len(piece)):
        left, right = piece[:at], piece[at:]
        if left in ids and right in ids:
            yield left, right


def _add_tokens(backend: Tokenizer, vocabulary: Vocabulary, user_defined: list[str]) -> None:
    """Add the control and user-defined tokens to the tokenizer. One call per kind is used, since every call rebuilds a trie."""
    special = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])


def _add_template(backend: Tokenizer, vocabulary: Vocabulary, add_bos: bool) -> None:
    """Add a template that puts BOS and EOS around each encoded text. Labels replace token names, which may contain template
    syntax."""
    before = [("BOS", vocabulary.named_ids["bos"])] if add_bos and "bos" in vocabulary.named_ids else []
    after = [("EOS", vocabulary.named_ids["eos"])] if vocabulary.add_eos and "eos" in vocabulary.named_ids else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(label for label, _ in before), "$A", *(label for label, _ in after)],
            special_tokens=before + after,
        )
