"""Models that transformers builds and that we only page: its modules and weights, our KV cache, attention and sampling.

`describe.py` and `load.py` alone import transformers, and only when a model asks for it."""
