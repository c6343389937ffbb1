"""Sampling: converts logits to token ids, in ordered stages and one random draw."""
