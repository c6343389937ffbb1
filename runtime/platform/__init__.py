"""Platforms: memory, queues, events, graphs, kernel sets and runners of one kind of device. Chosen once per process."""
