"""Text as it streams: codecs from token ids to text and from text to events. Feed and flush, nothing else."""
