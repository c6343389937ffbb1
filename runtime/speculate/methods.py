"""Methods: how a SpeculativeConfig becomes a Proposer. A method of another kind is a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runtime.speculate.anything import Anything
from runtime.speculate.config import SpeculativeConfig
from runtime.speculate.ngram import Ngram
from runtime.speculate.proposer import Proposer
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
}  # of those that guess on the host


def speculation_of(
    config: SpeculativeConfig, draft_share: float, follow_share: float = 0.0, longest: int | None = None
) -> Speculation:
    """Of a method that says where it looks things up; ngram does so on the host. `draft_share`: what a draft is assumed to take, in
    steps of a single row. `follow_share`: what a draft model, or a head, is assumed to add to a step by computing it, too.
    `longest`: tokens of a step with drafts, beyond which they would cost many times as much."""
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
