"""Engine: converts requests into steps, and step results into token streams."""

from runtime.engine.facade import Engine as Engine
