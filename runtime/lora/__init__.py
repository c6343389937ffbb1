"""LoRA adapters of one base model: loading, host memory and device slots. See README.md."""
