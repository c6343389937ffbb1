"""API-neutral core of generation: requests to prompt ids, token ids to events. Knows no API, HTTP or frames."""
