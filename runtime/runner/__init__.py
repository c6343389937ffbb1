"""Execution of scheduled batches: fills inputs, runs the forward pass and samples."""
