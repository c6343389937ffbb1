"""Control tokens in untrusted text: the chat template may write control tokens, but a client's text may not.

Control tokens are a tokenizer's special tokens, and strings that look like them (`<|user|>`, `<｜User｜>`). During rendering, a
`Shield` replaces each control token in the client's texts by a mark, and text edges that could form one. In the rendered text,
the template's own tokens become random aliases, which a second tokenizer maps to the special tokens. The client's strings are
thus encoded as ordinary text. If the client's texts contain no control tokens, all of this is skipped."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken

_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_UNKNOWN = "?"


class ControlTokens:
    """Control tokens of one tokenizer, and a random alias for each. Aliases differ between processes."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._tokens = {
            id: token
            for id, token in sorted(added.items())
            if token.content.strip() and (token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content))
        }
        self.nonce = secrets.token_hex(8)
        self._aliases = {token.content: f"<{self.nonce}:{id}>" for id, token in self._tokens.items()}
        contents = [token.content for token in self._tokens.values()]
        self._firsts = tuple({content[0] for content in contents})
        self._lasts = tuple({content[-1] for content in contents})
        self._beginnings = frozenset(content[:size] for content in contents for size in range(1, len(content)))
        self._endings = frozenset(content[size:] for content in contents for size in range(1, len(content)))
        self._max_chars = max(map(len, contents), default=0)
        self._finder = _finder(self._tokens.values())
        normalizer = backend.normalizer
        self._normalize = (
            None if normalizer is None or not any(token.normalized for token in self._tokens.values())
            else normalizer.normalize_str
        )  # fmt: skip
        self._plain: PlainTokens | None = None

    @property
    def plain(self) -> PlainTokens:
        """Second tokenizer (`PlainTokens`). It is created on first use, which takes some tenths of a second."""
        if self._plain is None:
            self._plain = PlainTokens(self._backend, self._tokens, self._aliases, self.nonce)
        return self._plain

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return (start, end) of each control token that the tokenizer finds in `text`."""
        if not any(first in text for first in self._firsts):
            return []
        encoding = self._finder.encode_batch([text], add_special_tokens=False)[0]
        found = []
        for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if id:  # with the white space that it takes along
                content = self._finder.id_to_token(id) or ""
                start = text.index(content, start, end)
                found.append((start, start + len(content)))
        return found

    def cuts(self, text: str) -> list[tuple[int, int]]:
        """Return (start, end) of the parts of a client's `text` that must not be rendered unchanged. These are control tokens,
        and empty parts at the edges of `text` where a control token could begin or end."""
        found = self.spans(text)
        if not found and self._normalize is not None and self.spans(self._normalize(text)):
            found = [(0, 0)]
        head, tail = text[: self._max_chars], text[-self._max_chars :]
        if any(last in head for last in self._lasts) and self._is_part(head, self._endings, backwards=False):
            found = [(0, 0), *found]
        if any(first in tail for first in self._firsts) and self._is_part(tail, self._beginnings, backwards=True):
            found = [*found, (len(text), len(text))]
        return found

    def with_aliases(self, text: str) -> str:
        """Return `text` with each control token replaced by its alias."""
        pieces, done = [], 0
        for start, end in self.spans(text):
            pieces += [text[done:start], self._aliases[text[start:end]]]
            done = end
        return "".join([*pieces, text[done:]])

    @staticmethod
    def _is_part(text: str, parts: frozenset[str], *, backwards: bool) -> bool:
        """Return whether `text` begins with one of `parts`; with `backwards`, whether `text` ends with one."""
        return any((text[-size:] if backwards else text[:size]) in parts for size in range(1, len(text) + 1))


class Shield:
    """Replacement of a client's control tokens by marks while one conversation is rendered."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._hidden: list[str] = []
        self._mark = f"x{control.nonce}"

    def around(self, given: Any, render: Callable[[Any], str]) -> tuple[str, str | None]:
        """Return `render(given)` as `reveal` returns it. `given`: JSON data. Its control tokens are replaced before rendering."""
        return self.reveal(render(self.hide(given)))

    def hide(self, value: Any) -> Any:
        """Return JSON data `value` with marks in place of the control tokens in its texts and names."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self._hide_text(name): self.hide(inside) for name, inside in value.items()}
        if isinstance(value, Sequence):
            return [self.hide(inside) for inside in value]
        return value

    def reveal(self, rendered: str) -> tuple[str, str | None]:
        """Return two texts: `rendered` with the client's control tokens in place of the marks, and the same with aliases for the
        template's control tokens. The second is None if nothing was replaced."""
        parts = re.split(f"{self._mark}([0-9]+)z", rendered) if self._hidden else [rendered]
        if len(parts) == 1:
            return rendered, None
        parts[1::2] = [self._hidden[int(number)] for number in parts[1::2]]
        text = "".join(parts)
        parts[::2] = map(self._control.with_aliases, parts[::2])
        return text, "".join(parts)

    def _hide_text(self, text: str) -> str:
        cuts = self._control.cuts(text)
        if not cuts:
            return text
        pieces, done = [], 0
        for start, end in cuts:
            pieces += [text[done:start], f"{self._mark}{len(self._hidden)}z"]
            self._hidden.append(text[start:end])
            done = end
        return "".join([*pieces, text[done:]])


class PlainTokens:
    """Tokenizer that encodes control tokens as ordinary text, and the aliases of control tokens as control tokens."""

    def __init__(
        self, backend: tokenizers.Tokenizer, control: Mapping[int, AddedToken], aliases: Mapping[str, str], nonce: str
    ) -> None:
        plain = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            plain.pre_tokenizer = backend.pre_tokenizer
        if backend.post_processor is not None:
            plain.post_processor = backend.post_processor
        ids = backend.get_vocab(with_added_tokens=False).values()
        gaps = range(
            max(ids, default=-1) + 1 - len(ids)
        )  # a new token's id is the number of tokens, where that is free
        plain.add_tokens([AddedToken(f"<{nonce}-{number}>", normalized=False) for number in gaps])
        others = {id: token for id, token in backend.get_added_tokens_decoder().items() if id not in control}
        plain.add_tokens([others[id] for id in sorted(others)])
        plain.add_tokens(
            [
                AddedToken(
                    aliases[token.content], normalized=False,
                    single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
                )
                for token in control.values()
            ]
        )  # fmt: skip
        self.backend = plain
        self._ids = {plain.token_to_id(token.content): id for id, token in others.items()}
        self._ids |= {plain.token_to_id(aliases[token.content]): id for id, token in control.items()}
        self._spelled: dict[int, list[int]] = {}
        # A Unigram model may contain a control token as a word; it is then split into characters.
        self._spelled = {
            id: self._letters(token.content, control)
            for id, token in control.items()
            if id not in self._ids and backend.model.id_to_token(id) is not None
        }

    def ids(self, found: list[int]) -> list[int]:
        """Convert token ids of this tokenizer to token ids of the model's tokenizer."""
        ids = self._ids
        if not self._spelled or self._spelled.keys().isdisjoint(found):
            return [ids.get(id, id) for id in found]
        return [one for id in found for one in self._spelled.get(id, (ids.get(id, id),))]

    def _letters(self, text: str, control: Mapping[int, AddedToken]) -> list[int]:
        letters = [self.backend.encode(letter, add_special_tokens=False).ids for letter in text]
        return [id for ids in letters for id in ids if id not in control]


def _finder(tokens: Any) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits text into control tokens and the text between them."""
    finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({_UNKNOWN: 0}, unk_token=_UNKNOWN))
    finder.add_tokens(
        [
            AddedToken(
                token.content, normalized=False, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip
            )
            for token in tokens
        ]
    )
    return finder
