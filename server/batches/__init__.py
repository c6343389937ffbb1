"""Requests in OpenAI's batch format: the lines of a file, and files and batches that a server keeps on disk."""
