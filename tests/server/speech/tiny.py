"""A tiny speech model's text side: a tokenizer of bytes with Whisper's control tokens, and sounds."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Sequence

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from runtime.api import Request, SpeechInfo
from server.models.speech import ServedSpeech, SpeechFormat
from server.models.tokenizer import Tokenizer

RATE = 16_000
CONTROL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
END, START, EN, DE, FR, TRANSLATE, TRANSCRIBE, _, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = range(256, 256 + len(CONTROL))
STAMP = NO_TIMESTAMPS + 1
VOCAB = STAMP + 1501
INFO = SpeechInfo(num_mel_bins=80)


def speech_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({byte: id for id, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    backend.add_tokens([AddedToken(f"<|{number * 0.02:.2f}|>", special=False) for number in range(1501)])
    return Tokenizer(backend, {"eos_token": "<|endoftext|>"})


def served(tokenizer: Tokenizer, tmp_path, *, multilingual: bool = True, **generation) -> ServedSpeech:
    generation = {
        "is_multilingual": multilingual,
        "suppress_tokens": [1, 2],
        "begin_suppress_tokens": [220, END],
        **generation,
    }
    return ServedSpeech(SpeechFormat.read(INFO, tokenizer, {"vocab_size": VOCAB}, generation, tmp_path), 1 << 30)


def stamp(seconds: float) -> int:
    return STAMP + round(seconds / 0.02)


def says(tokenizer: Tokenizer, *parts: str | float) -> list[int]:
    """The ids of texts, and of timestamps for numbers; then the end."""
    ids: list[int] = []
    for part in parts:
        ids += [stamp(part)] if isinstance(part, float) else tokenizer.encode(part, add_special_tokens=False)
    return [*ids, END]


def is_probe(request: Request) -> bool:
    return bool(request.sampling.logprob_token_ids)


def script(tokenizer: Tokenizer, answer: Callable[[Request], Sequence[str | float]]) -> Callable[[Request], list[int]]:
    """What an engine says: `answer`'s parts to a window, anything to a probe."""
    return lambda request: [DE] if is_probe(request) else says(tokenizer, *answer(request))


def tone(seconds: float, pauses: Sequence[float] = (), hertz: float = 440.0) -> np.ndarray:
    """A tone with pauses of 0.6 s around the seconds given."""
    time = np.arange(int(seconds * RATE)) / RATE
    samples = 0.3 * np.sin(2 * np.pi * hertz * time)
    for pause in pauses:
        samples[np.abs(time - pause) < 0.3] = 0.0
    return samples.astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()
