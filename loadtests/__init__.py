"""HTTP load generator for OpenAI-compatible servers, on loopback by default. Standard library only; independent of oneloop."""
