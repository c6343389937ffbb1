"""Parallel execution of one model on several devices: each rank computes its shard of a step, and ranks exchange tensors."""
