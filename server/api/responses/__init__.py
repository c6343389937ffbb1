"""OpenAI's Responses API, with a store of responses."""
