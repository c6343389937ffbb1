"""Parallel: one model on several devices of one process: each rank computes its shard of a step, and tensors are exchanged on the
way."""
