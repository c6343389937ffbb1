"""Tool parsers, one format of tool calls per file."""
