"""Encoding: cached outputs of media encoders, and the encoder work before a step."""
