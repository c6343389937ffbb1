"""NVIDIA's modelopt, by its algorithms FP8, FP8_PER_CHANNEL_PER_TOKEN (fp8.py) and NVFP4 (nvfp4.py), whose activations stay in 16
bits here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.weights.formats.fp8 import Fp8
from runtime.weights.formats.nvfp4 import Nvfp4
from runtime.weights.formats.scheme import Scheme, UnreadScheme


def modelopt(section: Mapping[str, Any]) -> Scheme:
    """Raises UnreadScheme."""
    algorithm = section.get("quant_algo", "FP8")
    if algorithm == "NVFP4":
        return Nvfp4()
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise UnreadScheme(f"by the algorithm {algorithm}")
    return Fp8(section)


SCHEMES = {"modelopt": modelopt}
