"""Encoding of texts and pairs to token ids for pooling, truncated if requested. Large inputs are encoded off the event loop.

Truncation keeps the special tokens around a text. If an input is too long, only its beginning is encoded, and the error names
its field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from server.api.pooling.request import Input, Pair, PoolRequest, PoolText
from server.generate.encode import chat_ids, encode_pieces
from server.generate.plain_prompts import CHARS_PER_PROMPT, TRUNCATE, check_ids
from server.generate.request import Chat
from server.http.call import Call
from server.http.errors import ContextLengthExceeded, Field, InvalidRequest, TextOnly, clip
from server.http.offload import Pieces
from server.models.control_tokens import Shield
from server.models.model import LoadedModel
from server.models.prompt import PromptError
from server.models.score_template import ScoreTemplate
from server.models.tokenizer import PIECE_CHARS

BATCH = 64  # short texts that go to the tokenizer in one call


class EncodedInput(NamedTuple):
    """Token ids of one input. `token_type_ids`: None if all are 0."""

    ids: list[int]
    token_type_ids: list[int] | None = None


def cost_of(given: Input) -> int:
    """Estimate the cost of encoding `given`, as a number of characters."""
    match given:
        case PoolText(content=content):
            return CHARS_PER_PROMPT + len(content)
        case Pair(first=first, second=second):
            return cost_of(first) + cost_of(second)
    return CHARS_PER_PROMPT


def _limit(loaded: LoadedModel, request: PoolRequest) -> int:
    context, truncation = loaded.engine.model.max_model_len, request.truncation
    if truncation is None or truncation.num_tokens == -1:
        return context
    if truncation.num_tokens > context:
        raise InvalidRequest(
            TRUNCATE, f" {truncation.num_tokens} is more than this model's context of {context}", param=TRUNCATE
        )
    return truncation.num_tokens


class InputEncoder:
    """Encoder of one request's inputs. A first text that consecutive pairs share is tokenised once."""

    def __init__(self, loaded: LoadedModel, request: PoolRequest) -> None:
        self._loaded = loaded
        self._tokenizer = loaded.tokenizer
        self._framing = loaded.tokenizer.framing
        self._request = request
        self._plain = not request.allow_special_tokens
        self._context = loaded.engine.model.max_model_len
        self._limit = _limit(loaded, request)
        self._score_template = None if loaded.pooling is None else loaded.pooling.score_template
        self._last_first: tuple[PoolText, list[int]] | None = None

    async def encoded(self, call: Call, inputs: Sequence[Input]) -> list[EncodedInput]:
        """Encode `inputs`, a consecutive part of the request's inputs. Raises InvalidRequest."""
        if isinstance(inputs[0], Chat):
            return [await self._chat(call, inputs[0])]
        return await call.run_pieces(sum(map(cost_of, inputs)), self.pieces(inputs))

    async def _chat(self, call: Call, chat: Chat) -> EncodedInput:
        if chat.media:
            part = chat.media[0]
            raise TextOnly(part.where, part.kind, param=part.where)
        ids = await chat_ids(self._loaded, call, chat)
        if self._request.truncation is not None:
            ids = self._cut(ids, self._limit)
        return self.checked(ids, Field("messages"))

    def pieces(self, inputs: Sequence[Input]) -> Pieces[list[EncodedInput]]:
        found: list[EncodedInput] = []
        since_rest = 0
        while len(found) < len(inputs):
            batch = self._batch(inputs, len(found))
            if batch:
                found += self._together(batch)
                since_rest += sum(map(cost_of, batch))
            else:
                given = inputs[len(found)]
                found.append((yield from self._one(given)))
                since_rest += cost_of(given)
            if since_rest > PIECE_CHARS and len(found) < len(inputs):
                since_rest = 0
                yield
        return found

    def _batch(self, inputs: Sequence[Input], start: int) -> list[PoolText]:
        """Return the texts from index `start` on that can be encoded in one call: short texts without truncation."""
        found: list[PoolText] = []
        num_chars = 0
        for given in inputs[start : start + BATCH]:
            whole = isinstance(given, PoolText) and isinstance(given.content, str) and given.max_tokens is None
            num_chars += cost_of(given)
            if not whole or self._request.truncation is not None or num_chars > PIECE_CHARS:
                break
            assert isinstance(given, PoolText)
            found.append(given)
        return found

    def _together(self, texts: Sequence[PoolText]) -> list[EncodedInput]:
        prefix, special = self._request.prefix, self._request.add_special_tokens
        contents = [prefix + text.content for text in texts if isinstance(text.content, str)]
        ids = self._tokenizer.encode_batch(contents, special, self._plain)
        return [self.checked(each, text.name) for each, text in zip(ids, texts, strict=True)]

    def _one(self, given: Input) -> Pieces[EncodedInput]:
        if isinstance(given, Pair):
            return (yield from self._pair(given))
        assert isinstance(given, PoolText), "a conversation is alone"
        if isinstance(given.content, list):
            yield from check_ids(given.content, self._loaded.engine.model.vocab_size, given.name)
            ids = given.content if given.max_tokens is None else self._cut(given.content, given.max_tokens)
            return self.checked(self._cut(ids, self._limit) if self._request.truncation else ids, given.name)
        if given.max_tokens is None and self._request.truncation is None:
            special = self._request.add_special_tokens
            ids = yield from self._ids(given, self._request.prefix + given.content, special=special, fits=True)
            return self.checked(ids, given.name)
        ids = yield from self._content(given, self._request.prefix)
        if not self._request.add_special_tokens:
            return self.checked(self._cut(ids, self._limit) if self._request.truncation else ids, given.name)
        if self._request.truncation is not None:
            ids = self._cut(ids, self._room(self._framing.num_single))
        return self.checked(self._framing.framed(ids), given.name)

    def _pair(self, pair: Pair) -> Pieces[EncodedInput]:
        if self._score_template is not None:
            return (yield from self._templated(pair, self._score_template))
        first = yield from self._first(pair, self._request.prefix)
        second = yield from self._content(pair.second, "")
        if self._request.truncation is not None:
            room = self._room(self._framing.num_pair)
            first, second = self._cut_longest(first, second, room)
        ids, types = self._framing.framed_pair(first, second)
        known = self._loaded.engine.model.pooler.num_token_types > 1
        return self.checked(ids, pair.name)._replace(token_type_ids=types if known else None)

    def _templated(self, pair: Pair, template: ScoreTemplate) -> Pieces[EncodedInput]:
        """Encode a pair with the model's prompt template. Only the two texts are truncated, not the template's text."""
        cuts = self._request.truncation is not None
        first, second = str(pair.first.content), str(pair.second.content)
        ids: tuple[list[int], list[int]] = ([], [])
        if cuts or pair.first.max_tokens is not None or pair.second.max_tokens is not None:
            query = yield from self._first(pair, "")
            document = yield from self._content(pair.second, "")
            # No prompt holds more of them, however long they are.
            ids = self._cut_longest(query, document, self._limit) if cuts else (query, document)
            first, second = self._texts(ids)
        while True:
            found = yield from self._rendered(template, first, second, pair.name)
            if not cuts or len(found) <= self._limit:
                return self.checked(found, pair.name)
            room = sum(map(len, ids)) - (len(found) - self._limit)
            if room <= 0:
                raise InvalidRequest(
                    TRUNCATE, f" {self._limit} leaves no room for text in this model's prompt", param=TRUNCATE
                )
            ids = self._cut_longest(*ids, room)
            first, second = self._texts(ids)

    def _texts(self, ids: tuple[list[int], list[int]]) -> tuple[str, str]:
        """Decode two lists of token ids to texts, without incomplete characters at their ends."""
        first, second = (self._tokenizer.decode(each, skip_special_tokens=False).strip("\ufffd") for each in ids)
        return first, second

    def _rendered(self, template: ScoreTemplate, first: str, second: str, name: Field) -> Pieces[list[int]]:
        """Render and encode a pair. Special tokens in the texts are encoded as text, unless the server allows special tokens."""
        shield = None if self._loaded.allow_special_tokens else Shield(self._tokenizer.control)
        try:
            text, escaped = template.render(shield, first, second, self._request.instruction)
        except PromptError as error:
            raise InvalidRequest(clip(error), param=name) from None
        return (
            yield from encode_pieces(
                self._loaded, text if escaped is None else escaped, add_special_tokens=template.add_special_tokens,
                param=name, fits=self._request.truncation is None, plain=escaped is not None,
            )
        )  # fmt: skip

    def _first(self, pair: Pair, prefix: str) -> Pieces[list[int]]:
        """Return the token ids of a pair's first text. The last first text is cached."""
        if self._last_first is None or self._last_first[0] is not pair.first:
            self._last_first = pair.first, (yield from self._content(pair.first, prefix))
        return self._last_first[1]

    def _content(self, text: PoolText, prefix: str) -> Pieces[list[int]]:
        """Return the token ids of `text` without special tokens, truncated to the text's own limit."""
        if isinstance(text.content, list):
            yield from check_ids(text.content, self._loaded.engine.model.vocab_size, text.name)
            ids = text.content
        else:
            is_cut = text.max_tokens is not None or self._request.truncation is not None
            ids = yield from self._ids(text, prefix + text.content, special=False, fits=not is_cut)
        return ids if text.max_tokens is None else self._cut(ids, text.max_tokens)

    def _ids(self, text: PoolText, content: str, *, special: bool, fits: bool) -> Pieces[list[int]]:
        return (
            yield from encode_pieces(
                self._loaded, content, add_special_tokens=special, param=text.name, fits=fits, plain=self._plain
            )
        )

    def _cut(self, ids: list[int], num_tokens: int) -> list[int]:
        if len(ids) <= num_tokens:
            return ids
        from_left = self._request.truncation is not None and self._request.truncation.side == "left"
        return ids[-num_tokens:] if from_left else ids[:num_tokens]

    def _cut_longest(self, first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
        """Truncate two texts to `room` tokens in total, as tokenizers do: the longer one first, or the second if they are equal."""
        half = room // 2
        if len(first) <= half:
            return first, self._cut(second, room - len(first))
        if len(second) <= half:
            return self._cut(first, room - len(second)), second
        odd = room - half
        halves = (odd, half) if len(first) > len(second) else (half, odd)
        return self._cut(first, halves[0]), self._cut(second, halves[1])

    def _room(self, num_around: int) -> int:
        """Return the number of tokens left for texts besides `num_around` special tokens. Raises InvalidRequest if none is left."""
        if self._limit <= num_around:
            raise InvalidRequest(
                TRUNCATE, f" {self._limit} leaves no room for text besides {num_around} special tokens", param=TRUNCATE
            )
        return self._limit - num_around

    def checked(self, ids: list[int], name: Field) -> EncodedInput:
        """Return `ids` as an EncodedInput. Raises InvalidRequest if `ids` is empty, ContextLengthExceeded if it is too long."""
        if not ids:
            raise InvalidRequest(name, " is empty: at least one token is required", param=name)
        if len(ids) > self._context:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self._context} tokens, but ", name, f" has {len(ids)} tokens. ",
                "Shorten it, or set truncate_prompt_tokens to cut it", param=name,
            )  # fmt: skip
        return EncodedInput(ids)
