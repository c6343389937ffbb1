"""KV bookkeeping: block ids, spans and sharing in plain Python; only `kv_cache` knows tensors."""
