"""Options of the server. A dataclass field is an option: flag, variable, key of the file, help and checks follow from it."""

__version__ = "0.1.0"  # as in pyproject.toml
