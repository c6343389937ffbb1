"""Ollama's API: converts requests to the core's, and answers to its JSON lines."""
