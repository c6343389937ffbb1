"""SpeculativeConfig: what a user asks of speculative decoding, by vLLM's names. Standard library only: `--help` reads it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, Self

METHODS: Final = ("ngram", "suffix", "draft_model", "ngram_gpu", "ngram_cpu", "mtp", "eagle", "eagle3")
DEVICE_METHODS: Final = (
    "draft_model",
    "ngram_gpu",
    "mtp",
    "eagle",
    "eagle3",
)  # methods that guess behind a step, on the device
HEADS: Final = ("mtp", "eagle", "eagle3")  # of these, those by layers that read the model's hidden states
WITH_MODEL: Final = ("draft_model", "eagle", "eagle3")  # of these, those that a checkpoint of their own is named for
_ELSEWHERE: Final = {  # vLLM's, and why they are refused
    "extract_hidden_states": "it guesses nothing",
    "medusa": "its heads are published as pickle files, which are never loaded, and were made for trees of guesses; an eagle3 head "
    "is right more often",
    "mlp_speculator": "its heads guess less than those of eagle3",
}
MAX_DRAFTS: Final = 64  # a row's in one step
_DEFAULT_DRAFTS: Final = 8
_DEFAULT_OF_HEADS: Final = 3  # which are trained to guess the next few
_DEFAULT_LOOKUP: Final = (2, 5)  # tokens
_LOOKUP, _SUFFIX = "prompt_lookup_", "suffix_decoding_"


class Lookup(NamedTuple):
    """How many last tokens are looked for in a text, which is `max_model_len` tokens at most."""

    shortest: int
    longest: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """`num_speculative_tokens`: drafts of a row in one step at most; `adaptive`: fewer where fewer bring more, and none where they
    cost more than they bring. `prompt_lookup_max`, `prompt_lookup_min` (ngram, ngram_gpu, ngram_cpu): how many last tokens are
    looked for. (ngram is one of the other two: see `where`.)
    `suffix_decoding_*` (suffix): how many last tokens are looked for at most, how many past answers are kept, how many drafts
    there are at most for each token found again, and how likely all drafts up to one must be right. `model` (draft_model,
    eagle, eagle3): what guesses, called as `--model` is. (mtp: layers that the model's own checkpoint brings.)
    `synthetic_acceptance`: drafts are accepted by this chance and not by truth, so answers are nonsense: to measure speed.

    Raises ValueError, which names what is wrong."""

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_min: int = _DEFAULT_LOOKUP[0]
    prompt_lookup_max: int = _DEFAULT_LOOKUP[1]
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    adaptive: bool = True
    synthetic_acceptance: float | None = None

    @classmethod
    def parse(cls, given: object) -> Self:
        """The configuration that a text of JSON says, or an object. Raises ValueError."""
        if isinstance(given, str):
            import json

            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                raise ValueError(f"is not JSON: {error.msg} at character {error.pos + 1}") from None
        if not isinstance(given, Mapping):
            raise ValueError('is not a JSON object such as {"method": "ngram", "num_speculative_tokens": 3}')
        return cls.of(given)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """What is None is as if it were not there. Raises ValueError."""
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise ValueError(
                    f"unknown key {key!r}{_did_you_mean(str(key), known)}; the keys are {', '.join(known)}"
                )
        values = {key: value for key, value in given.items() if value is not None}
        method = values.get("method")
        if method is None:
            raise ValueError(f"method is missing: one of {', '.join(METHODS)}")
        if isinstance(method, str) and method.endswith("_mtp"):
            method = values["method"] = "mtp"  # vLLM has a name for each family's
        _check_method(method)
        if "prompt_lookup_max" in values and "prompt_lookup_min" not in values:
            values["prompt_lookup_min"] = values["prompt_lookup_max"]  # as vLLM has it
        elif "prompt_lookup_min" in values and "prompt_lookup_max" not in values:
            values["prompt_lookup_max"] = values["prompt_lookup_min"]
        for key in values:
            for prefix, owners in ((_LOOKUP, ("ngram", "ngram_gpu", "ngram_cpu")), (_SUFFIX, ("suffix",))):
                if key.startswith(prefix) and method not in owners:
                    raise ValueError(f"{key} is for method {' and '.join(owners)}, not {method}")
        if "model" in values and method not in WITH_MODEL:
            raise ValueError(f"model is for method {' and '.join(WITH_MODEL)}, not {method}")
        values.setdefault("num_speculative_tokens", _DEFAULT_OF_HEADS if method in HEADS else _DEFAULT_DRAFTS)
        return cls(**values)

    def __post_init__(self) -> None:
        _check_method(self.method)
        if self.method in WITH_MODEL and not (isinstance(self.model, str) and self.model):
            raise ValueError(
                f"model {self.model!r} is not the name of a draft model: a folder, a .gguf file or a hub id"
            )
        _check_count("num_speculative_tokens", self.num_speculative_tokens, MAX_DRAFTS)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            _check_count(name, getattr(self, name), MAX_DRAFTS)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is more than prompt_lookup_max {self.prompt_lookup_max}"
            )
        _check_count("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 256, least=2)
        _check_count("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 10**7, least=0)
        _check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0, 64.0)
        _check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0)
        if self.synthetic_acceptance is not None:
            _check_number("synthetic_acceptance", self.synthetic_acceptance, 0.0, 1.0)
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive {self.adaptive!r} is neither true nor false")

    def where(self, *, on_device: bool) -> Self:
        """With ngram as the method that is meant, of which nobody has said where it looks things up."""
        if self.method != "ngram":
            return self
        return replace(self, method="ngram_gpu" if on_device else "ngram_cpu")

    def lookup(self, max_model_len: int) -> Lookup | None:
        """What is looked up on the device, None where nothing is."""
        if self.method != "ngram_gpu":
            return None
        return Lookup(self.prompt_lookup_min, self.prompt_lookup_max, max_model_len)

    @property
    def on_device(self) -> bool:
        return self.method in DEVICE_METHODS

    @property
    def reads_predictions(self) -> bool:
        """Whether what a request predicts is looked up."""
        return self.method in ("suffix", "ngram", "ngram_gpu", "ngram_cpu")

    @property
    def follows(self) -> bool:
        """Whether what guesses has layers of its own, which compute steps as the model does."""
        return self.method in HEADS or self.method in WITH_MODEL

    def __str__(self) -> str:
        """The method and its options, in words for the log."""
        length = "up to " if self.adaptive else ""
        by = self.method if self.model is None else f"{self.method} {self.model}"
        text = f"{by}, {length}{self.num_speculative_tokens} drafts of a sequence in a step"
        if self.synthetic_acceptance is None:
            return text
        return f"{text}; SYNTHETIC ACCEPTANCE {self.synthetic_acceptance:g}: ANSWERS ARE NONSENSE"


def _check_method(method: object) -> None:
    if method not in METHODS:
        served = f"{', '.join(METHODS[:-1])} and {METHODS[-1]} are"
        if (why := _ELSEWHERE.get(str(method))) is not None:
            raise ValueError(f"method {method!r} is not served: {why}; {served}")
        raise ValueError(f"unknown method {method!r}{_did_you_mean(str(method), METHODS)}; {served} served")


def _check_count(name: str, value: object, most: int, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} {value!r} is not a whole number from {least} to {most}")


def _check_number(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{name} {value!r} is not a number from {least:g} to {most:g}")


def _did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""
