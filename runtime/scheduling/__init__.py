"""Parts of the scheduler: the lines of sequences, the rows of a step, and what steps bring back."""
