"""SpeculativeConfig: options of speculative decoding, with vLLM's names. Imports the standard library only, as `--help` uses it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, Self

METHODS: Final = ("ngram", "suffix", "draft_model", "ngram_gpu", "ngram_cpu", "mtp", "eagle", "eagle3")
HEADS: Final = ("mtp", "eagle", "eagle3")  # layers that read the model's hidden states
WITH_MODEL: Final = ("draft_model", "eagle", "eagle3")  # methods with a checkpoint of their own
DEVICE_METHODS: Final = ("draft_model", "ngram_gpu", *HEADS)  # methods with drafts made on the device
_LOOKUPS: Final = ("ngram", "ngram_gpu", "ngram_cpu")
_OF_METHODS: Final = {
    "prompt_lookup_": _LOOKUPS,
    "suffix_decoding_": ("suffix",),
    "model": WITH_MODEL,
}  # keys, by prefix
_REFUSED: Final = {  # methods of vLLM that are not supported
    "extract_hidden_states": "it makes no drafts",
    "medusa": "its heads are pickle files, which are never loaded; use an eagle3 head",
    "mlp_speculator": "eagle3 heads are right more often",
}
MAX_DRAFTS: Final = 64  # per sequence and step
_DEFAULT_DRAFTS: Final = 8
_DEFAULT_OF_HEADS: Final = 3


class LookupLengths(NamedTuple):
    """Settings of n-gram lookup. `shortest`, `longest`: minimum and maximum length of the n-gram at the end of the text.
    `max_model_len`: maximum length of the text, in tokens."""

    shortest: int
    longest: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Options of speculative decoding. Raises ValueError if they are invalid.

    `num_speculative_tokens`: maximum draft tokens of a sequence in a step. `adaptive`: use fewer or none if that is faster.
    `prompt_lookup_*` (method ngram): minimum and maximum n-gram length. `suffix_decoding_*` (method suffix): maximum length of
    a match, number of stored past answers, maximum draft tokens per matching token, and minimum probability that all are
    accepted. `model` (draft_model, eagle, eagle3): name or path, as for `--model`. `synthetic_acceptance`: accept draft tokens
    with this probability, to measure speed; answers are nonsense."""

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    adaptive: bool = True
    synthetic_acceptance: float | None = None

    @classmethod
    def parse(cls, given: object) -> Self:
        """Return the configuration given as JSON text or as a mapping. Raises ValueError if it is invalid."""
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
        """Return the configuration given as a mapping. Keys whose value is None are ignored. Raises ValueError if it is invalid."""
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
            method = values["method"] = "mtp"  # vLLM has a separate name for each model family
        _check_method(method)
        if "prompt_lookup_max" in values and "prompt_lookup_min" not in values:
            values["prompt_lookup_min"] = values["prompt_lookup_max"]  # as in vLLM
        elif "prompt_lookup_min" in values and "prompt_lookup_max" not in values:
            values["prompt_lookup_max"] = values["prompt_lookup_min"]
        for key in values:
            for prefix, owners in _OF_METHODS.items():
                if key.startswith(prefix) and method not in owners:
                    raise ValueError(f"{key} is for method {' and '.join(owners)}, not {method}")
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
        """Return this configuration with the method `ngram` replaced by `ngram_gpu` if `on_device`, else by `ngram_cpu`."""
        if self.method != "ngram":
            return self
        return replace(self, method="ngram_gpu" if on_device else "ngram_cpu")

    def lookup(self, max_model_len: int) -> LookupLengths | None:
        """Return the settings of n-gram lookup on the device, or None if the method is another one."""
        if self.method != "ngram_gpu":
            return None
        return LookupLengths(self.prompt_lookup_min, self.prompt_lookup_max, max_model_len)

    @property
    def on_device(self) -> bool:
        return self.method in DEVICE_METHODS

    @property
    def reads_predictions(self) -> bool:
        """True if draft tokens may also come from a request's `prediction`."""
        return self.method == "suffix" or self.method in _LOOKUPS

    @property
    def follows(self) -> bool:
        """True if the drafter is a model or head, which must compute every token that the model computes."""
        return self.method in HEADS or self.method in WITH_MODEL

    def __str__(self) -> str:
        """Return a description for the log: the method and its options."""
        length = "up to " if self.adaptive else ""
        by = self.method if self.model is None else f"{self.method} {self.model}"
        text = f"{by}, {length}{self.num_speculative_tokens} drafts of a sequence in a step"
        if self.synthetic_acceptance is None:
            return text
        return f"{text}; SYNTHETIC ACCEPTANCE {self.synthetic_acceptance:g}: ANSWERS ARE NONSENSE"


def _check_method(method: object) -> None:
    if method not in METHODS:
        served = f"{', '.join(METHODS[:-1])} and {METHODS[-1]} are"
        if (why := _REFUSED.get(str(method))) is not None:
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
