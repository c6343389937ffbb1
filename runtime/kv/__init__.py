"""Bookkeeping of KV blocks in plain Python: block ids, token ranges and sharing. Only the module `kv_cache` uses tensors."""
