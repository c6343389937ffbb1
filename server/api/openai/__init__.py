"""OpenAI's chat and text completions: an adapter over the core. Wire types in, frames out."""
