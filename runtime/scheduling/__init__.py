"""Modules of the scheduler: queues of sequences, rows of a step, and recording of step results."""
