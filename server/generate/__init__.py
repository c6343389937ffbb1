"""The neutral core: from what a client wants generated to prompt ids, and from token ids to events. No API, no HTTP, no frames."""
