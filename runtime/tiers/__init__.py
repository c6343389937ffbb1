"""KV tiers: host memory and a disk behind the prefix cache."""
