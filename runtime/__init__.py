"""Inference engine: takes token ids and returns token ids. It has no text and no HTTP."""
