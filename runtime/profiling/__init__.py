"""What a running engine does, written as a trace that Perfetto and chrome://tracing open."""
