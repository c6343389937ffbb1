"""Structured outputs: compiles the output constraints of clients to matchers for the engine."""
