"""Pictures, sound and videos of requests: fetched, decoded and processed off the loop, within limits."""
