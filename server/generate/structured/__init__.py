"""Structured outputs: compiles constraints of clients to matchers for the engine."""
