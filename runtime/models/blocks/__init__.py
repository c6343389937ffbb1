"""Blocks of a decoder, one kind per file. Each is built from its spec and weights, and then only called."""
