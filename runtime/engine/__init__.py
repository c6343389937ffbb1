"""The engine: the one task between requests and steps."""

from runtime.engine.facade import Engine as Engine
