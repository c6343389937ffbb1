"""Tokenizer: converts text to token ids and back, and reads special tokens and chat templates from the tokenizer's files.

Immutable. `encode` takes about 0.25 ms per thousand characters and releases the GIL, so long texts can be encoded on a thread;
the caller decides by the text's length. Independent of requests and models: token ids are checked against the tokenizer's
vocabulary, not against the model's embedding."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import tokenizers

from server.http.offload import Pieces
from server.models.control_tokens import ControlTokens
from server.models.framing import Framing
from server.text.detokenize import TokenTable
from server.text.gguf import TokenizerError, Vocabulary, build_backend

PIECE_CHARS = 16_384  # some four milliseconds of tokenising

# After a line break that follows a visible character; before a single space between letters, which belongs to the second word.
_PLACE = re.compile(r"(?<=\S\n)(?=[^\W_])|(?<=[A-Za-z])(?= [A-Za-z])")

_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}
_LOCAL_PRE_TOKENIZERS = {
    "Split",
    "Digits",
    "Punctuation",
    "ByteLevel",
    "BertPreTokenizer",
    "Whitespace",
    "WhitespaceSplit",
}
_PROBE = "word word\nword"


class TextPieces:
    """Finder of positions at which a text can be split without changing its tokens, if the tokenizer has any."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._has_places = _has_places(backend)

    def ends(self, text: str) -> Iterator[int]:
        """Yield the end position of each piece of `text`. Pieces have different lengths."""
        start, size = 0, len(text)
        while self._has_places and size - start > PIECE_CHARS:
            search, found = start + PIECE_CHARS, None
            while found is None and search < size:
                found = _PLACE.search(text, search, search + PIECE_CHARS)
                search += PIECE_CHARS
            if found is None:
                break
            start = found.start()
            yield start
        yield size


def _has_places(backend: tokenizers.Tokenizer) -> bool:
    if backend.pre_tokenizer is None or not _are_local(_state(backend.pre_tokenizer), _LOCAL_PRE_TOKENIZERS):
        return False
    if backend.normalizer is not None and not _are_local(_state(backend.normalizer), _LOCAL_NORMALIZERS):
        return False
    for token in backend.get_added_tokens_decoder().values():
        if _PLACE.search(token.content) or (token.rstrip and token.content[-1:].isalpha()):
            return False
    words = backend.pre_tokenizer.pre_tokenize_str(_PROBE)
    starts = {span[0] for _, span in words}
    return len("word word\n") in starts and not starts.isdisjoint({len("word"), len("word ")})


def _state(component: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(component.__getstate__())
    return found


def _are_local(state: dict[str, Any], kinds: set[str]) -> bool:
    parts = state.get("pretokenizers", state.get("normalizers"))
    if parts is not None:
        return all(_are_local(part, kinds) for part in parts)
    return state.get("type") in kinds and not state.get("add_prefix_space")


__all__ = ["Tokenizer", "TokenizerError", "TooManyTokens"]

# Names under which chat templates of all families end a turn or a text. A GGUF file gives one eos id, and models trained
# for chat may end with another of these; only control tokens count.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


CUT_TOKENS = 4  # by so many tokens a cut at any place changes the number of them, at most


class TooManyTokens(ValueError):
    """Error: a text is too long. Its first `num_chars` characters have about `num_tokens` tokens."""

    def __init__(self, num_chars: int, num_tokens: int) -> None:
        super().__init__(f"the first {num_chars} characters are {num_tokens} tokens")
        self.num_chars = num_chars
        self.num_tokens = num_tokens


class Tokenizer:
    """Tokenizer of a served model. `named_tokens`: special tokens by the name in transformers ("bos_token": "<s>").
    `chat_template`: Jinja source, sources by name, or None. `eos_token_ids`: ids that end a text. `infill_ids`:
    fill-in-the-middle tokens of a GGUF file ("fim_pre", …). `token_types`: whether the model needs token types of a pair.
    `table`: texts of all ids, both whole and in pieces."""

    __slots__ = (
        "_backend",
        "_pieces",
        "_vocab_size",
        "bos_token",
        "bos_token_id",
        "chat_template",
        "control",
        "eos_token",
        "eos_token_id",
        "eos_token_ids",
        "framing",
        "infill_ids",
        "named_tokens",
        "table",
    )  # fmt: skip

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        infill_ids: Mapping[str, int] = MappingProxyType({}),
        token_types: bool = True,
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may carry the settings of its last training run
        backend.no_padding()
        self._backend = backend
        self.table = TokenTable(backend)
        self._pieces = TextPieces(backend)
        self.framing = Framing.of(backend, token_types=token_types)
        self.control = ControlTokens(backend)
        self.infill_ids = infill_ids
        self._vocab_size = max(
            backend.get_vocab_size(with_added_tokens=True), max(backend.get_added_tokens_decoder(), default=-1) + 1
        )
        self.named_tokens = dict(named_tokens)
        self.chat_template = chat_template
        self.bos_token = named_tokens.get("bos_token")
        self.bos_token_id = self.id_of(self.bos_token)
        self.eos_token = named_tokens.get("eos_token")
        self.eos_token_id = self.id_of(self.eos_token)
        own_eos = frozenset() if self.eos_token_id is None else frozenset({self.eos_token_id})
        self.eos_token_ids = own_eos | eos_token_ids

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Create the tokenizer from a Hugging Face folder. Raises TokenizerError that names the missing or broken file."""
        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise TokenizerError(_no_tokenizer_json(folder))
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library has only this type for what it refuses
            raise TokenizerError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        if read_json(folder / "sentence_bert_config.json").get("do_lower_case"):  # as sentence-transformers does
            lowercase = tokenizers.normalizers.Lowercase()
            usual = [] if backend.normalizer is None else [backend.normalizer]
            backend.normalizer = tokenizers.normalizers.Sequence([lowercase, *usual])
        config = read_json(folder / "tokenizer_config.json")
        named = _named_tokens(read_json(folder / "special_tokens_map.json") | config)
        try:
            _add_configured_tokens(backend, config, named)
            return cls(backend, named, _folder_template(folder, config), token_types=_has_token_types(config))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(f"{folder / 'tokenizer_config.json'} is malformed: {error!r}") from error

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Create the tokenizer from the metadata of a GGUF file. Arrays in `metadata` are sequences. Raises TokenizerError for
        unknown kinds and for contradictory metadata."""
        vocabulary = Vocabulary.read(metadata)
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        ids = vocabulary.named_ids
        named = {name: vocabulary.tokens[ids[key]] for key, name in names.items() if key in ids}
        backend = build_backend(vocabulary)
        ends = {ids[key] for key in ("eos", "eot", "eom") if key in ids}
        control = {token.content: id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        ends |= {control[token] for token in _END_TOKENS if token in control}
        if "<|channel|>" in control:  # harmony: an answer is several messages, and this is the end of one
            ends.discard(control.get("<|end|>"))
        infill_ids = {name: id for name, id in ids.items() if name.startswith("fim_")}
        return cls(backend, named, _gguf_template(metadata), frozenset(ends), infill_ids)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """Underlying tokenizer of the tokenizers library. Do not change it."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one. A model's embedding may have more rows (padding), never fewer."""
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        return self.table.special_ids

    def encode(self, text: str, add_special_tokens: bool = True, plain: bool = False) -> list[int]:
        """Return the token ids of `text`. `add_special_tokens`: add the tokenizer's special tokens around it (mostly BOS). If
        `text` begins with BOS, as a rendered chat template does, no second BOS is added. `plain`: encode control tokens in
        `text` as text, and aliases of control tokens as control tokens (see `control_tokens`). Raises ValueError for text that
        is not Unicode (lone surrogates)."""
        (ids,) = self.encode_batch([text], add_special_tokens, plain)
        return ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, plain: bool = False
    ) -> list[list[int]]:
        """Return the token ids of each text. Faster than one by one. Arguments and errors are those of `encode`."""
        backend = self.control.plain.backend if plain else self._backend
        # To what is plain the tokens around a text have other ids, so they come last.
        framed = plain and add_special_tokens and self.framing.single is not None
        try:
            # Not `encode_batch`, nor `encode`: only the batch calls release the GIL, and the fast one leaves out the offsets.
            encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens and not framed)
        except TypeError as error:
            raise ValueError("the text contains a lone surrogate; it is not valid Unicode") from error
        found: list[list[int]] = []
        for text, encoding in zip(texts, encodings, strict=True):
            ids: list[int] = self.control.plain.ids(encoding.ids) if plain else encoding.ids
            ids = self.framing.framed(ids) if framed else ids
            found.append(self._with_one_bos(text, ids, add_special_tokens, plain))
        return found

    def encode_pieces(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None, plain: bool = False
    ) -> Pieces[list[int]]:
        """Encode `text` piece by piece where it can be split; the result is the same as that of `encode`. Raises TooManyTokens
        soon after `max_tokens` is exceeded, or ValueError as `encode` does."""
        if len(text) <= PIECE_CHARS or self.framing.single is None:
            return self.encode(text, add_special_tokens, plain)
        before, after = self.framing.single if add_special_tokens else ([], [])
        ids, start = [*before], 0
        for end in self._pieces.ends(text):
            if max_tokens is not None and end - start > max(2 * PIECE_CHARS, max_tokens):
                yield from self._check_piece(text, start, end, len(ids), max_tokens)
            ids += self.encode(text[start:end], False, plain)
            start = end
            if max_tokens is not None and len(ids) > max_tokens:
                raise TooManyTokens(end, len(ids))
            yield
        return self._with_one_bos(text, [*ids, *after], add_special_tokens, plain)

    def _check_piece(self, text: str, start: int, end: int, num_tokens: int, max_tokens: int) -> Pieces[None]:
        """Estimate the number of tokens of `text[start:end]`, which has no split positions, before it is encoded. The text is
        cut anywhere, because encoding time grows faster than the length. `num_tokens`: tokens of the text before it. Raises
        TooManyTokens."""
        for cut in range(start + PIECE_CHARS, end, PIECE_CHARS):
            num_tokens += len(self.encode(text[cut - PIECE_CHARS : cut], False)) - CUT_TOKENS
            if num_tokens > max_tokens:
                raise TooManyTokens(cut, num_tokens)
            yield

    def _with_one_bos(self, text: str, ids: list[int], add_special_tokens: bool, plain: bool) -> list[int]:
        if not add_special_tokens or len(ids) < 2 or not ids[0] == ids[1] == self.bos_token_id:
            return ids
        bos = self.bos_token or ""
        return ids[1:] if text.startswith(self.control.with_aliases(bos) if plain else bos) else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Ids outside the vocabulary are skipped. Raises ValueError for negative or too large ids."""
        try:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise ValueError("a token id is negative or does not fit 32 bits") from error

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that token `id` adds to a text; b"" if `id` is outside the vocabulary."""
        return self.table.token_bytes(id)

    def all_token_bytes(self) -> list[bytes]:
        """Return the bytes of each token of the vocabulary, by id. Slow: do not call on the event loop."""
        return self.table.all_token_bytes(self._vocab_size)

    def token_string(self, id: int) -> str:
        """Return the token `id` in the vocabulary's spelling ("Ġthe", "▁the"); "" outside the vocabulary."""
        return (self._backend.id_to_token(id) or "") if 0 <= id < self._vocab_size else ""

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [self.token_string(id) for id in ids]

    def ids_of(self, tokens: Collection[str]) -> frozenset[int]:
        """Return the ids of those `tokens` that are in the vocabulary."""
        return frozenset(id for token in tokens if (id := self._backend.token_to_id(token)) is not None)

    def id_of(self, token: str | None) -> int | None:
        """Return the id of `token`, in the vocabulary's spelling; None if the vocabulary does not contain it."""
        return None if token is None else self._backend.token_to_id(token)


# --- Hugging Face folders -----------------------------------------------------------------------------------------


def _no_tokenizer_json(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    others = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / name).is_file()]
    if not others:
        return f"{folder} has no tokenizer.json; give a tokenizer with --tokenizer"
    return (
        f"{folder} has {others[0]} but no tokenizer.json, the one format read here; convert it once with "
        "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if the file does not exist."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return content


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens in `config` by name. Each is a string there, or an object with the field `content`."""
    named = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            named[name] = token
    return named


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add tokens to `backend` that only tokenizer_config.json lists as added or special. Named tokens outside the vocabulary are
    left out, because they would get an id above the model's last."""
    added = {}
    for id, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        flags = {key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        if backend.token_to_id(entry["content"]) in (None, int(id)):
            added[entry["content"]] = tokenizers.AddedToken(entry["content"], **flags)
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token in named.values():
        is_special = (added.get(token) or known.get(token) or tokenizers.AddedToken(token)).special
        if not is_special and backend.token_to_id(token) is not None:
            added[token] = tokenizers.AddedToken(token, special=True, normalized=False)
    missing = [
        token for content, token in added.items() if content not in known or token.special != known[content].special
    ]
    backend.add_tokens(missing)


def _has_token_types(config: Mapping[str, Any]) -> bool:
    """Return whether the model receives token types, as in transformers 5. Plain tokenizers need `model_input_names` to list
    them."""
    names = config.get("model_input_names")
    if names is None:
        return config.get("tokenizer_class") not in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return "token_type_ids" in names


def template_of(folder: Path, metadata: Mapping[str, Any] | None) -> str | dict[str, str] | None:
    """Return the chat template of a folder, or of a GGUF file's `metadata`, without creating a tokenizer. Raises TokenizerError."""
    if metadata is not None:
        return _gguf_template(metadata)
    return _folder_template(folder, read_json(folder / "tokenizer_config.json"))


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat templates of a folder: those in *.jinja files, else in tokenizer_config.json, else in chat_template.json."""
    named: dict[str, str] = {}
    main = folder / "chat_template.jinja"
    if main.is_file():
        named["default"] = main.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    if named:
        return named["default"] if named.keys() == {"default"} else named
    found = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return found if isinstance(found, str | dict) else None


# --- GGUF ---------------------------------------------------------------------------------------------------------


def _gguf_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat templates of a GGUF file: `tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for each NAME in
    `tokenizer.chat_templates`."""
    names = metadata.get("tokenizer.chat_templates") or []
    keys = {"default": "tokenizer.chat_template"} | {name: f"tokenizer.chat_template.{name}" for name in names}
    found = {name: metadata[key] for name, key in keys.items() if isinstance(metadata.get(key), str)}
    return found["default"] if found.keys() == {"default"} else found or None
