"""Sampling: converts logits to token ids, by several stages in order and one random draw."""
