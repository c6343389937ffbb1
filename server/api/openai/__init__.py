"""OpenAI's chat and text completions: wire types in, frames out."""
