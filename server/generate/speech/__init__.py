"""Transcription and translation of audio: a core of its own beside that of generated text. No API, no HTTP."""
