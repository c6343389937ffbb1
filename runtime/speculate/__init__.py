"""Speculative decoding: draft tokens of sequences, and how many are worth verifying in a step. See README.md."""
