"""Readers of a Hugging Face config.json: typed fields with clear errors, and parts that several families share."""
