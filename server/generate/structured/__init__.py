"""Structured outputs: from what a client asks of an answer's form to the matchers that hold the engine to it."""
