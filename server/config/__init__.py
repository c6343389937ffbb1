"""Options of the server. A dataclass field defines an option with its flag, variable, config key, help and checks."""

__version__ = "0.1.0"  # as in pyproject.toml
