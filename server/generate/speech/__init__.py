"""Core of transcription and translation of audio, for all APIs. Independent of HTTP."""
