"""Profiles of a running engine, as traces for Perfetto and chrome://tracing."""
