"""Snapshots of recurrent states: a prefix cache for recurrent and hybrid models."""
