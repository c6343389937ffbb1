"""Anthropic's Messages API: converts its requests to GenerateRequests, and answers to Anthropic's events."""
