"""Live transcription: converts streamed audio to text that is final once it is returned.

After each second of audio, the current window is decoded again, after the text that is already final. Words in which two
consecutive decodings agree become final (LocalAgreement, Macháček et al. 2023). Final tokens are the prefix of later decodings,
so the returned pieces concatenate to the whole text. A full window is cut at a pause. Time is counted in samples, so the same
audio in the same pieces gives the same text. A decoding is skipped if the next is already due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from runtime.api import MediaItem
from server.config.server_config import ServerConfig
from server.generate.speech.request import TranscribeRequest
from server.generate.speech.windows import WindowDecoder
from server.http.call import Call
from server.http.offload import Pieces
from server.media.log_mel import Float32s
from server.media.silence import cuts
from server.media.windows import COST, Sound, joined
from server.models.model import LoadedModel

ATTEMPT_S: Final = 1.0  # of audio between two attempts
MAX_SEARCH_S: Final = 10.0  # of a full window, in which a pause is looked for


class LiveTranscript:
    """Live transcript of one audio item. Call `append` with audio, `step` while `is_due`, and `end` after the last audio."""

    def __init__(
        self, config: ServerConfig, call: Call, loaded: LoadedModel, request: TranscribeRequest, *, id: str
    ) -> None:
        """Create the transcript. The fields `in_order` and `after_text` of `request` are not used."""
        speech = loaded.require_speech()
        info = speech.format.info
        self.text = ""  # that was returned
        self.num_samples = 0  # of all audio
        self._call = call
        self._loaded = loaded
        self._speech = speech
        self._decoder = WindowDecoder(config, call, loaded, speech, request, id)
        self._language = request.language
        self._before = self._decoder.prompt_ids(request.prompt)
        self._pieces: list[Float32s] = []  # of the window
        self._window_samples = 0
        self._attempted_samples = 0
        self._attempt_size = int(ATTEMPT_S * info.sample_rate)
        self._max_samples = info.num_frames * info.hop_length
        self._settled: list[int] = []  # of the window
        self._last: list[int] = []  # what the last attempt drew behind them
        self._settled_text = ""
        self._has_entered = self._has_ended = False

    def append(self, samples: Float32s) -> None:
        self._pieces.append(samples)
        self._window_samples += len(samples)
        self.num_samples += len(samples)

    def end(self) -> None:
        """Mark the end of the audio. The next steps make all text final."""
        self._has_ended = True

    @property
    def is_due(self) -> bool:
        """True if `step` should be called: there is enough new audio, or the audio has ended."""
        return self._has_ended or self._window_samples - self._attempted_samples >= self._attempt_size

    @property
    def is_done(self) -> bool:
        return self._has_ended and not self._window_samples

    @property
    def unsettled_samples(self) -> int:
        """Number of samples that no decoding has used yet."""
        return self._window_samples - self._attempted_samples

    async def step(self) -> str:
        """Decode the current window. Return the text that became final since the last step, or "".

        Raises ApiError or EngineError."""
        if not self._has_entered:
            await self._decoder.enter()
            self._has_entered = True
        if self._window_samples > self._max_samples:
            return await self._end_window(await self._cut())
        if self._has_ended:
            return await self._end_window(self._window_samples)
        num_samples = self._window_samples - self._window_samples % self._attempt_size
        window = await self._attempt(num_samples, is_last=False)
        self._attempted_samples = num_samples
        return self._settle(window)

    async def _cut(self) -> int:
        """Return the number of samples up to a pause near the end of a full window."""
        info = self._speech.format.info
        longest_s = self._max_samples / info.sample_rate
        search_s = min(MAX_SEARCH_S, longest_s / 2)
        pieces = self._pieces[:]

        def work() -> int:
            return cuts(joined(pieces), info.sample_rate, longest_s, search_s)[0][1]

        return await self._speech.workers.run(COST, work, self._call.caller)

    async def _end_window(self, num_samples: int) -> str:
        added = ""
        if num_samples:
            ids = await self._attempt(num_samples, is_last=True)
            added = self._added(self._text_with(ids))
        rest = joined(self._pieces)[num_samples:]
        self._pieces, self._window_samples = [rest], len(rest)
        self._attempted_samples = 0
        self._settled, self._last, self._settled_text = [], [], ""
        return added

    async def _attempt(self, num_samples: int, *, is_last: bool) -> list[int]:
        """Decode the first `num_samples` of the window. Return the tokens after the final tokens."""
        info, mel = self._speech.format.info, self._speech.mel
        pieces = self._pieces[:]

        def work() -> Pieces[MediaItem]:
            return (yield from Sound(joined(pieces)[:num_samples], info, mel).window(0))

        item = await self._speech.workers.run_pieces(COST, work(), self._call.caller)
        if self._language is None and self._speech.format.is_multilingual:
            self._language = await self._decoder.language(item)
        once = None if is_last else _nothing  # what is decoded again anyway has no second attempt
        window = await self._decoder.decode(item, self._language, self._before, once, prefix=self._settled)
        return window.ids if window.is_speech else []

    # --- what is settled ----------------------------------------------------------------------------------------------

    def _settle(self, ids: Sequence[int]) -> str:
        """Make the words final in which `ids` and the previous decoding agree. Return their text."""
        agreed = 0
        while agreed < min(len(ids), len(self._last)) and ids[agreed] == self._last[agreed]:
            agreed += 1
        end = next((at for at in range(agreed, 0, -1) if self._ends_word(ids, at)), 0)
        self._settled += ids[:end]
        self._last = [*ids[end:]]
        return self._added(self._text_with(())) if end else ""

    def _ends_word(self, ids: Sequence[int], at: int) -> bool:
        """Return True if a word ends before token `at`: the token begins with a space, or in scripts without spaces (Chinese)
        the text before it ends with a complete character."""
        if at >= len(ids):
            return False
        following = self._loaded.tokenizer.token_bytes(ids[at])
        if following.startswith(b" "):
            return True
        text = self._decoder.text([*self._settled, *ids[:at]])
        return bool(text) and text[-1].isalpha() and not text[-1].isascii() and _has_no_case(text[-1])

    def _text_with(self, ids: Sequence[int]) -> str:
        return self._decoder.text([*self._settled, *ids])

    def _added(self, text: str) -> str:
        """Return the part of the window's `text` that was not returned before. The whole transcript begins without a space."""
        added, self._settled_text = text[len(self._settled_text) :], text
        if not self.text:
            added = added.lstrip()
        self.text += added
        return added


def _has_no_case(character: str) -> bool:
    return character.lower() == character.upper()


def _nothing(ids: Sequence[int]) -> None:
    """Ignore `ids`. Passing this callback to `decode` limits the window to one attempt."""
