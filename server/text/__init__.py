"""Streaming codecs: convert token ids to text, and text to events. Each codec has the two methods `feed` and `flush`."""
