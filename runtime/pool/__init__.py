"""From hidden states to one vector a sequence: what a row pools, and how."""
