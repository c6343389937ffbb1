"""Start-up: creates a running Engine from an EngineConfig and model files. All parts of the runtime are connected here.

Importing torch, reading weights and the first steps run on a worker thread; on a CPU it is the thread that will compute. The
event loop answers /health meanwhile."""

from runtime.start.plan import SharedDevice, outline_model, plan_engine
from runtime.start.replicas import start_engine, start_replicas

__all__ = ["SharedDevice", "outline_model", "plan_engine", "start_engine", "start_replicas"]
