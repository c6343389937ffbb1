"""Constraints on what a sequence may draw next: matchers on threads, token masks, and deferred sampling where a mask is late."""
