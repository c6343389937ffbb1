"""Quantising a model's matrices into a folder of their own, as compressed-tensors writes them: `oneloop quantize`."""
