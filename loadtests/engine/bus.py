"""Command `python -m loadtests.engine.bus`: measure plain copies between host and device, which limit the speed of a KV tier.

It copies page-locked memory to and from a GPU, and memory to memory on a CPU. The output is one JSON line, in GB per second."""

from __future__ import annotations

import argparse
import json
import time

import torch

_COPY_BYTES, _NUM_COPIES, _NUM_ROUNDS = 64 << 20, 16, 5


def rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Return the highest rate of several rounds of copies from `source` to `target`, in GB per second."""
    took_s = []
    for _ in range(_NUM_ROUNDS):
        began_s = time.perf_counter()
        for _ in range(_NUM_COPIES):
            target.copy_(source, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took_s.append(time.perf_counter() - began_s)
    return _NUM_COPIES * source.nbytes / min(took_s) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    on_host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu")
    on_device = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    to_device, to_host = rate(on_device, on_host), rate(on_host, on_device)
    print(json.dumps({"device": str(device), "to_device": round(to_device, 2), "to_host": round(to_host, 2)}))


if __name__ == "__main__":
    main()
