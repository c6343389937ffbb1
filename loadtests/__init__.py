"""The outside client: measures any OpenAI-compatible server over HTTP on loopback. Standard library only; knows no oneloop code."""
