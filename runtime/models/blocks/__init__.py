"""The blocks a decoder is made of, one per file: built from a spec and its weights, then only called."""
