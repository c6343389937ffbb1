"""The server's own routes: health, metrics, sleep, profiles, tokens, adapters, the dashboard."""
