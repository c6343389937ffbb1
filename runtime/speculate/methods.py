"""Methods: table from the method of a SpeculativeConfig to its proposer. To add a method, add a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runtime.speculate.config import SpeculativeConfig
from runtime.speculate.ngram import Ngram
from runtime.speculate.proposer import Anything, Proposer
from runtime.speculate.speculation import DeviceSpeculation, Speculation
from runtime.speculate.suffix import Suffix
from runtime.speculate.verification_cost import VerificationCost


def _ngram(config: SpeculativeConfig) -> Proposer:
    return Ngram(config.prompt_lookup_min, config.prompt_lookup_max)


def _suffix(config: SpeculativeConfig) -> Proposer:
    return Suffix(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_cached_requests,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
    )


PROPOSERS: Mapping[str, Callable[[SpeculativeConfig], Proposer]] = {
    "ngram_cpu": _ngram,
    "suffix": _suffix,
}  # methods with drafts on the host


def speculation_of(
    config: SpeculativeConfig, draft_share: float, follow_share: float = 0.0, longest: int | None = None
) -> Speculation:
    """Return the controller of speculative decoding for `config`.

    `draft_share`: assumed cost of a draft token, as a multiple of the time of a step with one row. `follow_share`: assumed cost
    of running the draft model or head after a step, in the same unit. `longest`: maximum tokens of a step with draft tokens."""
    config = config.where(on_device=False)
    cost = VerificationCost(draft_share, follow_share) if config.adaptive else None
    if config.on_device:
        return DeviceSpeculation(
            _ngram(config),
            config.num_speculative_tokens,
            cost,
            predictions=config.reads_predictions,
            rests=config.follows,
            longest=longest,
        )
    if config.synthetic_acceptance is not None:
        return Speculation(Anything(), config.num_speculative_tokens, cost, compares=False, longest=longest)
    return Speculation(PROPOSERS[config.method](config), config.num_speculative_tokens, cost, longest=longest)
