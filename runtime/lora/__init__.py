"""LoRA: adapters beside one base model: read, kept, and whose turn a slot is. See README.md."""
