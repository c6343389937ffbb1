"""Models as descriptions: a family converts a config to a DecoderSpec, and one decoder computes any spec."""
