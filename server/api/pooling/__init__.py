"""Prompts that become vectors, classes and scores: what the routes of pooling models share."""
