"""Inference engine, which takes token ids and returns token ids. It contains no code for text or HTTP."""
