"""Models that transformers builds and that we only page: its modules and weights, our KV cache, attention and sampling.

Only this folder imports transformers, all of it but `tried.py` and `spec.py`, and only when a model asks for it."""
