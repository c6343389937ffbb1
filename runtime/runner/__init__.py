"""Runs scheduled batches: inputs, model, sampler, in order."""
