"""llama.cpp's own API, except its OpenAI routes: converts its requests to GenerateRequests, and answers to its JSON."""
