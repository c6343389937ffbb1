"""Python interface of the engine, without an HTTP server: `LLM`, `AsyncLLM` and `asgi`."""
