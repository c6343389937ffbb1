"""Recorder of profiles: torch's profiler for all threads, and samples of one thread's Python stack. It blocks, so it runs on
its own thread."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from runtime.api import StepRecord
from runtime.profiling import trace
from runtime.profiling.stacks import StackSampler


class TorchRecorder:
    """Recorder that uses torch's profiler. `device`: device whose kernels are recorded in addition to CPU operators."""

    def __init__(self, device: str) -> None:
        import torch
        from torch.autograd.profiler import profile

        # Not torch.profiler: its first start imports torch.distributed, for metadata in the file, which takes seconds.
        self._profile = profile(
            use_cpu=True,
            use_device="cuda" if device.startswith("cuda") else None,
            use_kineto=True,
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        self._stacks: StackSampler | None = None

    def start(self, thread_id: int) -> None:
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        self._stacks = StackSampler(thread_id)

    def stop(self) -> None:
        assert self._stacks is not None, "it was started"
        self._calls = self._stacks.stop()
        self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def write(self, path: Path, steps: Sequence[StepRecord]) -> None:
        epoch_ns = time.time_ns() - time.monotonic_ns()
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            of_torch = Path(folder, "torch.json")
            self._profile.export_chrome_trace(str(of_torch))  # type: ignore[no-untyped-call]
            trace.write(path, of_torch, self._calls, steps, epoch_ns)
