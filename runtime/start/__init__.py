"""Start-up: creates a running Engine from an EngineConfig and model files. It connects all objects of the runtime.

Imports of torch, loading of weights and first steps run on a worker thread. On a CPU the same thread later computes the steps.
Meanwhile the event loop answers /health."""

from runtime.start.plan import SharedDevice, outline_model, plan_engine
from runtime.start.replicas import start_engine, start_replicas

__all__ = ["SharedDevice", "outline_model", "plan_engine", "start_engine", "start_replicas"]
