"""LoRA adapters of one base model: loads them into host memory and assigns device slots. See README.md."""
