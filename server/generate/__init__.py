"""Core of text generation for all APIs: converts requests to prompt token ids, and token ids to events. Independent of HTTP."""
