"""Served models without the engine: tokenizer, chat template, chat format, sampling defaults, and loading and unloading."""
