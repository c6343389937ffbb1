"""Encoding: what encoders of pictures and sounds have computed, and what they are to compute before a step."""
