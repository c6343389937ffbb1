"""Ollama's API: converts its requests to GenerateRequests, and answers to its JSON lines."""
