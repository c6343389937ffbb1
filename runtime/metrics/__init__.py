"""Numbers about a running engine, for /metrics and the log."""
