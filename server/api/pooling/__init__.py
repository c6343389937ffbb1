"""Routes of pooling models: compute vectors, classes and scores of prompts."""
