"""Files of requests in OpenAI's batch format: their lines, and files and batches that a server keeps on disk."""
