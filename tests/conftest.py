"""Before anything else: on a machine without a GPU, Triton kernels are decorated for its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
