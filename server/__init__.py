"""Text and HTTP: the OpenAI-compatible server above `runtime`. Nothing heavy is imported here."""

__version__ = "0.1.0"
