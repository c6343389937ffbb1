"""LoRA adapters of one base model: loading, storage and slots on the device. See README.md."""
