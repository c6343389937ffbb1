"""Tuning: measured numbers that select kernels and tile sizes, in one file per device instead of in code.

`of(device)` reads the file once and caches it. A device without a file gets the numbers of default.json, and a log line."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ops.tuning.numbers import Tuning

logger = logging.getLogger("oneloop.ops")

_INTERPRETED = 4  # multiprocessors without a device: few, so that Triton's interpreter runs no idle programs


@functools.cache
def of(device: torch.device) -> Tuning:
    """Return the tuning of a CUDA device, by its name and number of multiprocessors; default.json's for other devices."""
    from ops.tuning.files import DEFAULT, read  # importing its types takes as long as importing all of ops

    if device.type != "cuda":
        return read(DEFAULT).tuning(_INTERPRETED)
    properties = torch.cuda.get_device_properties(device)
    return for_device(properties.name, properties.multi_processor_count)


def for_device(name: str, multiprocessors: int) -> Tuning:
    """Return the tuning for a driver's device `name` ("NVIDIA H200"); without a file default.json's, with a log line."""
    from ops.tuning.files import DEFAULT, all_files, read

    for file in all_files():
        if file.is_for(name, multiprocessors):
            return file.tuning(multiprocessors)
    logger.warning("no tuning for %s with %d multiprocessors: using default.json", name, multiprocessors)
    return read(DEFAULT).tuning(multiprocessors)
