"""Parts of the scheduler: queues of sequences, rows of a step, and settling of step results."""
