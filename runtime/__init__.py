"""Token ids to token ids: the engine, and nothing about text or HTTP."""
