"""Speech: oneloop and other systems transcribe the same audio in one process, in turns. Run by `python -m loadtests speech`.

oneloop is used as a program uses it, by `LLM.transcribe`, features and text included; so is every other system."""
