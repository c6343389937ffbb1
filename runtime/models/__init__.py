"""Models: a family converts a config to a DecoderSpec, and one decoder computes any DecoderSpec."""
