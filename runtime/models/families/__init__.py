"""Families: one file each reads a Hugging Face config into the description of its models."""
