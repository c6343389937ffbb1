"""HTTP load generator for any OpenAI-compatible server, on loopback by default. Standard library only; independent of
oneloop."""
