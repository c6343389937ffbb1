"""Commands other than `serve`: chat and complete at a terminal, files of requests, doctor, quantize."""
