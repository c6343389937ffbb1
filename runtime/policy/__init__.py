"""Scheduling policies: the order of requests, and which decodes and how many prompt tokens a step contains."""
