"""Programs' interface: `LLM`, the engine without a server."""
