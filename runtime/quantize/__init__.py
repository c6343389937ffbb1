"""Quantisation of a model's matrices to a new folder in compressed-tensors format: `oneloop quantize`."""
