"""Tool parsers: one file per format of tool calls."""
