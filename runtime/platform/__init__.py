"""Where a model runs: memory, queues and events, graphs, kernel sets, and how a runner is built there. Chosen once."""
