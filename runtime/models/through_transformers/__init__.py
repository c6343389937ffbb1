"""Models run through transformers, with its modules. Decoders use our KV cache, attention and sampling; encoders process texts in
padded batches.

`describe.py`, `load.py`, `encoders.py` and `tower.py` import transformers. They are imported only when a model needs it."""
