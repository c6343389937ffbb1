"""The Responses API: an adapter over the core of chats, with a store of its own."""
