"""CUDA errors: whether a device still computes, by what was raised and by asking it.

An error in a kernel (an address that is not there, a failed assertion, a broken link) poisons the process' CUDA context: from then
on every call fails, and only another process can use the device. Where memory was short, the context is as good as before."""

from __future__ import annotations

import torch

from runtime.fault import Fault, host_fault

# cudaError_t: those after which "the process must be terminated and relaunched" (CUDA Runtime API, Data types): memory that cannot
# be corrected, a broken link, an illegal address, a timeout, a destroyed context, an assertion, and what a kernel dies of else.
STICKY_CODES = frozenset({214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})


def cuda_fault(error: BaseException) -> Fault:
    """The kind of an error that a step raised. Asks the device without waiting for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return Fault.MEMORY
    if getattr(error, "error_code", None) in STICKY_CODES or _is_poisoned():
        return Fault.LOST
    return host_fault(error)


def _is_poisoned() -> bool:
    """A poisoned context answers every call, the cheapest too, with the error that poisoned it."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.mem_get_info()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False
