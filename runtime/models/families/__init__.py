"""Model families: each file converts a Hugging Face config.json to a spec."""
