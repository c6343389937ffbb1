"""Families: each file converts a Hugging Face config to the description of its models."""
