"""Scheduling policies: order of requests, decode turns, and the tokens of a step."""
