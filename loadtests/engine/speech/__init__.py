"""Speech benchmark: oneloop and other systems transcribe the same audio in one process (`python -m loadtests speech`).

Systems take turns. Each computes features and text; oneloop is called by `LLM.transcribe`."""
