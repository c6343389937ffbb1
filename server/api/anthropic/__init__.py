"""Anthropic's Messages API: converts requests to the core's, and its answers to Anthropic's events."""
