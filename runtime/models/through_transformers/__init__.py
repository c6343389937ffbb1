"""Models built by transformers, with its modules and weights. Decoders use our KV cache, attention and sampling; encoders
process texts in padded batches.

`describe.py`, `load.py`, `encoders.py` and `tower.py` import transformers, and only when a model needs it."""
