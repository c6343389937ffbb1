"""Metrics of a running engine, for /metrics and the log."""
