"""Constraints on sampled tokens: grammar matchers on threads, token masks, and deferred sampling of rows whose masks are late."""
