"""Constraints on sampled tokens: matchers on threads, token masks, and deferred sampling for late masks."""
