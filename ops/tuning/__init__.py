"""The numbers of the device at hand, by which kernels and tiles are chosen: measured, in a file for each device, not in code.

`of(device)` reads the file once; after that it is a look-up. A device that no file is for gets default.json's, and a log line."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ops.tuning.numbers import Tuning

logger = logging.getLogger("oneloop.ops")

_INTERPRETED = 4  # multiprocessors of what is none: few, so that Triton's interpreter does not run idle programs


@functools.cache
def of(device: torch.device) -> Tuning:
    """The tuning of a CUDA device, by its name and number of multiprocessors; default.json's for any other kind of device."""
    from ops.tuning.files import DEFAULT, read  # their types take as long to make as all else of ops

    if device.type != "cuda":
        return read(DEFAULT).tuning(_INTERPRETED)
    properties = torch.cuda.get_device_properties(device)
    return for_device(properties.name, properties.multi_processor_count)


def for_device(name: str, multiprocessors: int) -> Tuning:
    """The tuning for a device whose driver calls it `name` ("NVIDIA H200"); default.json's, logged, where no file is for it."""
    from ops.tuning.files import DEFAULT, all_files, read

    for file in all_files():
        if file.is_for(name, multiprocessors):
            return file.tuning(multiprocessors)
    logger.warning("no tuning for %s with %d multiprocessors: using default.json", name, multiprocessors)
    return read(DEFAULT).tuning(multiprocessors)
