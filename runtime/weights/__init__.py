"""Finding, downloading and reading model files, with numpy only: no torch, and nothing about a model's computation."""
