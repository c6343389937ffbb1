"""Options of the server. Each option is a dataclass field, which defines its flag, variable, config key, help and checks."""

__version__ = "0.1.0"  # as in pyproject.toml
