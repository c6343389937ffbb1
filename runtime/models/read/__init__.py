"""Reading a Hugging Face config.json: typed fields with clear refusals, and what several families read alike."""
