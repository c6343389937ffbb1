"""Commands other than `serve`, such as chat and complete at a terminal, batch, doctor and quantize."""
