"""Mask functions of transformers, read as windows or refused."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from runtime.models.spec.model import UnsupportedModel
from runtime.models.through_transformers.describe import window_of


def test_the_whole_past_is_no_window():
    assert window_of(causal_mask_function) is None


@pytest.mark.parametrize("width", [1, 2, 20, 4096, 1 << 20])
def test_a_window_is_as_many_keys_as_a_query_sees(width):
    assert window_of(sliding_window_causal_mask_function(width)) == width


@pytest.mark.parametrize(
    "sees",
    [
        bidirectional_mask_function,
        chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
        lambda batch, head, query, key: (key <= query) & (key % 2 == 0),
        lambda batch, head, query, key: (key < 4) | ((key <= query) & (key > query - 20)),
        lambda batch, head, query, key: key < query,
    ],
)
def test_what_is_neither_is_refused(sees):
    with pytest.raises(UnsupportedModel, match="neither causal nor a sliding window"):
        window_of(sees)


def test_a_mask_that_looks_at_tokens_is_refused():
    kinds = torch.zeros(1, 5)
    with pytest.raises(UnsupportedModel, match="depends on more than positions"):
        window_of(lambda batch, head, query, key: kinds[batch, query] == kinds[batch, key])
