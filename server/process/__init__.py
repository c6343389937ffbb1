"""Server process: options become a model, an application and a port. Also signals, the drain, and terminal output."""
