"""Snapshots of recurrent states, with which recurrent and hybrid models use the prefix cache."""
