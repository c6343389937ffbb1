"""Pooling: from hidden states to one vector a sequence."""
