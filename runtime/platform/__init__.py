"""Platforms: memory, queues, events, graphs, kernels and runners of one kind of device. A process chooses one platform."""
