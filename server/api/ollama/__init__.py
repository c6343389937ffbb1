"""Ollama's API, an adapter over the core that chats share: its words in, its JSON lines out, nothing generated here."""
