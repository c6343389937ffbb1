"""Streaming codecs: token ids to text, and text to events. Each has only `feed` and `flush`."""
