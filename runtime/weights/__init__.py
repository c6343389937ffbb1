"""Finding, fetching and reading model files, with numpy alone: no torch, and no idea of what a model computes."""
