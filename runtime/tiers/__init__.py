"""KV tiers: host memory and disk that keep blocks evicted from the prefix cache."""
