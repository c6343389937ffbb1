"""Speculative decoding: makes draft tokens, and decides how many to verify in a step. See README.md."""
