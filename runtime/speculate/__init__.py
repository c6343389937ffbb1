"""Speculate: guesses of how sequences go on, and how many of them are worth a step's while. See README.md."""
