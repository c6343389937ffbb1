"""Models as descriptions: a family reads a config into a DecoderSpec, and one decoder computes whatever it says."""
