"""Execution of scheduled batches: inputs, forward pass and sampling, in order."""
