"""Tool parsers, one a file: how a family of models writes its calls."""
