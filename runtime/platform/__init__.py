"""Platforms: memory, queues and events, graphs, kernel sets, and building a runner, for one kind of device. Chosen once."""
