"""Command `oneloop quantize`: quantises a model's matrices and writes them to a new folder in compressed-tensors format."""
