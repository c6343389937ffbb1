"""llama.cpp's own API, without its OpenAI routes: converts requests to the core's, and answers to its JSON."""
