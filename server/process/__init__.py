"""The process: options become a model, an application and a port; signals and the drain, and what a person at the terminal sees."""
