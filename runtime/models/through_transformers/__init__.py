"""Models that transformers builds: its modules and weights. Those that generate are only paged, with our KV cache, attention and
sampling; encoders are given texts padded to batches.

`describe.py`, `load.py` and `encoders.py`, and `tower.py` for what sees, import transformers, and only when a model asks for it."""
