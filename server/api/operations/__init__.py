"""Routes to operate the server: health, metrics, sleep, profiles, tokens, adapters and the dashboard."""
