"""How much room adapters have, by vLLM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """`max_loras`: adapters that one step may have, each in a slot of the device. `max_cpu_loras`: those kept in memory, ready to
    take a slot, these included. `max_lora_rank`: of each. `lora_experts`, `lora_vocabulary`: whether a device has room for
    those that change experts, and embedding and head."""

    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    lora_experts: bool = False
    lora_vocabulary: bool = False

    def __post_init__(self) -> None:
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras})")
