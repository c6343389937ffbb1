"""OpenAI's audio API: transcriptions and translations."""
