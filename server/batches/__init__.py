"""Batches of requests in OpenAI's batch format: the lines of a file, and the files and batches that a server keeps on disk."""
