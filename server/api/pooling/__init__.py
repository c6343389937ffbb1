"""Routes of pooling models: prompts become vectors, classes and scores."""
