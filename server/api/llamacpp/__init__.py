"""llama.cpp's own API (not the parts of it that are OpenAI's), an adapter over the core: its words in, its JSON out."""
