"""Sampling: from logits to token ids, stages in order and one draw."""
