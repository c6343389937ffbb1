"""Systems that transcribe: oneloop, transformers, faster-whisper (CTranslate2) and whisper.cpp (pywhispercpp).

All decode greedily, without timestamps, temperature fallback, or the text of earlier windows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from loadtests.engine.speech.sounds import RATE, Samples
from runtime.weights.fetch import ModelFiles

WINDOW = 30 * RATE
MAX_BATCH = 64  # windows of a batch of transformers
END = "<|endoftext|>"


class System(Protocol):
    """System that transcribes several files at a time. `close` frees its memory."""

    name: str

    def transcribe(self, sounds: Sequence[Samples]) -> list[str]: ...
    def close(self) -> None: ...


class Oneloop:
    name = "oneloop"

    def __init__(self, model: str, num_tokens: int | None, options: dict[str, Any]) -> None:
        from oneloop import LLM

        self._llm = LLM(model, **({} if num_tokens is None else {"load_format": "dummy"}), **options)
        self._max_tokens = num_tokens

    def transcribe(self, sounds: Sequence[Samples]) -> list[str]:
        found = self._llm.transcribe(
            [(sound, RATE) for sound in sounds], language="en", temperature=0.0, compression_ratio_threshold=None,
            logprob_threshold=None, no_speech_threshold=None, max_tokens=self._max_tokens, use_tqdm=False,
        )  # fmt: skip
        for each in found:
            if self._max_tokens is not None and any(len(part.tokens) != self._max_tokens for part in each.segments):
                raise ValueError(f"oneloop did not generate {self._max_tokens} tokens for each window")
        return [each.text for each in found]

    def close(self) -> None:
        self._llm.close()


class Transformers:
    """System transformers: its method `generate` over batches of windows, in bfloat16 on a GPU and float32 on a CPU."""

    name = "transformers"

    def __init__(self, files: ModelFiles, num_tokens: int | None, device: str) -> None:
        import torch
        import transformers
        from tokenizers import Tokenizer

        self._torch, self._device, self._num_tokens = torch, device, num_tokens
        self._tokenizer = Tokenizer.from_file(str(files.tokenizer_path / "tokenizer.json"))
        self._end = self._tokenizer.token_to_id(END)
        config = transformers.WhisperConfig(**files.config)
        with torch.device(device):
            model: Any = transformers.WhisperForConditionalGeneration(config)
        advice = files.generation_config
        if num_tokens is None:
            model.load_state_dict(state_of_ctranslate2(files.path))
            advice = advice_of_ctranslate2(files.path, self._tokenizer)
        model.generation_config = transformers.GenerationConfig(**advice)
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._model = model.to(self._dtype).eval()
        self._extract = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins)

    def transcribe(self, sounds: Sequence[Samples]) -> list[str]:
        windows = [
            (file, sound[start : start + WINDOW])
            for file, sound in enumerate(sounds)
            for start in range(0, len(sound), WINDOW)
        ]
        texts = [""] * len(sounds)
        for first in range(0, len(windows), MAX_BATCH):
            batch = windows[first : first + MAX_BATCH]
            features = self._extract(
                [samples for _, samples in batch], sampling_rate=RATE, return_tensors="pt", device=self._device
            ).input_features.to(self._device, self._dtype)
            length = {} if self._num_tokens is None else {"max_new_tokens": self._num_tokens}
            with self._torch.inference_mode():
                found = self._model.generate(features, do_sample=False, num_beams=1, return_timestamps=False, **length)
            for (file, _), ids in zip(batch, found.tolist(), strict=True):
                if self._num_tokens is not None and len(ids) < self._num_tokens:
                    raise ValueError(f"transformers generated {len(ids)} tokens, not {self._num_tokens}")
                texts[file] += self._tokenizer.decode([id for id in ids if id < self._end])
        return texts

    def close(self) -> None:
        del self._model
        if self._device == "cuda":
            self._torch.cuda.empty_cache()


class FasterWhisper:
    """System faster-whisper, with as many threads as the others: all for one file, or one for each of several files."""

    name = "faster-whisper"

    def __init__(self, folder: Path, threads: int, compute_type: str) -> None:
        from faster_whisper import WhisperModel

        def model(workers: int) -> Any:
            return WhisperModel(
                str(folder),
                device="cpu",
                compute_type=compute_type,
                cpu_threads=threads // workers,
                num_workers=workers,
            )

        self._alone, self._together, self._threads = model(1), model(threads), threads

    def transcribe(self, sounds: Sequence[Samples]) -> list[str]:
        if len(sounds) == 1:
            return [self._text(self._alone, sounds[0])]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(lambda sound: self._text(self._together, sound), sounds))

    @staticmethod
    def _text(model: Any, sound: Samples) -> str:
        segments, _ = model.transcribe(
            sound, language="en", beam_size=1, temperature=0.0, without_timestamps=True, condition_on_previous_text=False,
            compression_ratio_threshold=None, log_prob_threshold=None, no_speech_threshold=None,
        )  # fmt: skip
        return "".join(segment.text for segment in segments)

    def close(self) -> None:
        del self._alone, self._together


class WhisperCpp:
    """System whisper.cpp, with as many threads as the others: all for one file, or one for each of several files."""

    name = "whisper.cpp"

    def __init__(self, ggml: Path, threads: int) -> None:
        from pywhispercpp.model import Model

        self._threads = threads
        self._models: list[Any] = [Model(str(ggml), redirect_whispercpp_logs_to=None) for _ in range(threads)]

    def transcribe(self, sounds: Sequence[Samples]) -> list[str]:
        if len(sounds) == 1:
            return [self._text(self._models[0], sounds[0], self._threads)]
        shares = [sounds[first :: self._threads] for first in range(self._threads)]

        def work(number: int) -> list[str]:
            return [self._text(self._models[number], sound, 1) for sound in shares[number]]

        with ThreadPoolExecutor(self._threads) as pool:
            done = list(pool.map(work, range(self._threads)))
        return [done[file % self._threads][file // self._threads] for file in range(len(sounds))]

    @staticmethod
    def _text(model: Any, sound: Samples, threads: int) -> str:
        segments = model.transcribe(
            np.ascontiguousarray(sound), language="en", n_threads=threads, no_context=True, temperature_inc=0.0,
            no_timestamps=True, print_progress=False, greedy={"best_of": 1},
        )  # fmt: skip
        return "".join(segment.text for segment in segments)

    def close(self) -> None:
        self._models.clear()


def state_of_ctranslate2(folder: Path) -> dict[str, Any]:
    """Return the weights in a CTranslate2 folder as float32, by the weight names of transformers."""
    import torch

    from runtime.weights.ctranslate2 import MODEL_BIN, CTranslate2Checkpoint

    checkpoint, state = CTranslate2Checkpoint(folder / MODEL_BIN), {}
    for name, shape in checkpoint.shapes.items():
        values = np.empty(shape, np.float32)
        checkpoint.read_rows(name, 0, values)
        state[name] = torch.from_numpy(values)
    checkpoint.close()
    state.setdefault("proj_out.weight", state["model.decoder.embed_tokens.weight"])
    return state


def advice_of_ctranslate2(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Return a generation_config for transformers from a CTranslate2 folder with an English-only model."""
    config, id_of = json.loads((folder / "config.json").read_text()), tokenizer.token_to_id
    end = id_of(END)
    return {
        "eos_token_id": end, "pad_token_id": end, "bos_token_id": end, "is_multilingual": False, "max_length": 448,
        "decoder_start_token_id": id_of("<|startoftranscript|>"), "no_timestamps_token_id": id_of("<|notimestamps|>"),
        "prev_sot_token_id": id_of("<|startofprev|>"), "suppress_tokens": config["suppress_ids"],
        "begin_suppress_tokens": config["suppress_ids_begin"], "return_timestamps": False,
    }  # fmt: skip
