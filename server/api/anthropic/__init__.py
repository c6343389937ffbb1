"""Anthropic's Messages API, an adapter over the core that chats share: its words in, its words out, nothing generated here."""
