"""Locating, downloading and reading model files. Uses numpy only, no torch, and is independent of a model's computation."""
