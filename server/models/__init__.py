"""Served models, text side: tokenizer, chat template, chat format, sampling defaults, life cycle."""
