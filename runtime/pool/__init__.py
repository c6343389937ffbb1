"""Pooling: reduces the hidden states of a text to one vector, or to one vector per token."""
