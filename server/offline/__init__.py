"""Without HTTP: `LLM` for programs, files of requests, and their progress."""
