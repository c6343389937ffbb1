"""Python interface: `LLM`, the engine without a server."""
