"""Server process: turns options into a model, an application and a port, and handles signals, draining and terminal output."""
