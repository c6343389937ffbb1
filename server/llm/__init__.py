"""`LLM`: the engine for programs, without a server."""
