"""OpenAI's chat and text completions: converts wire types to GenerateRequests, and answers to responses or events."""
