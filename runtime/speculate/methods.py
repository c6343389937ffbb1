"""Methods: how a SpeculativeConfig becomes a Proposer. A method of another kind is a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runtime.speculate.anything import Anything
from runtime.speculate.config import SpeculativeConfig
from runtime.speculate.ngram import Ngram
from runtime.speculate.on_device import DeviceSpeculation, Drafted
from runtime.speculate.proposer import Proposer
from runtime.speculate.speculation import Speculation
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


def _drafted(config: SpeculativeConfig) -> Proposer:
    return Drafted()


PROPOSERS: Mapping[str, Callable[[SpeculativeConfig], Proposer]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "draft_model": _drafted,
    "ngram_gpu": _drafted,
    "mtp": _drafted,
    "eagle": _drafted,
    "eagle3": _drafted,
}


def speculation_of(config: SpeculativeConfig, draft_share: float, follow_share: float = 0.0) -> Speculation:
    """`draft_share`: what a draft is assumed to take, in steps of a single row. `follow_share`: what a draft model, or a head, is
    assumed to add to a step by computing it, too."""
    cost = VerificationCost(draft_share, follow_share) if config.adaptive else None
    if config.on_device:
        proposer, most = PROPOSERS[config.method](config), config.num_speculative_tokens
        return DeviceSpeculation(proposer, most, cost, rests=config.follows)
    proposer = PROPOSERS[config.method](config) if config.synthetic_acceptance is None else Anything()
    return Speculation(proposer, config.num_speculative_tokens, cost)
