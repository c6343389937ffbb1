"""Starting: from an EngineConfig and model files to a running Engine. The composition root below the border.

Importing torch, reading weights and the first steps happen on a worker thread, on a CPU the thread that will compute.
The event loop answers /health meanwhile."""

from runtime.start.plan import SharedDevice, outline_model, plan_engine
from runtime.start.replicas import start_engine, start_replicas

__all__ = ["SharedDevice", "outline_model", "plan_engine", "start_engine", "start_replicas"]
