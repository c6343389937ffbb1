"""Readers of a Hugging Face config.json: typed fields with clear errors, and functions that several families share."""
