"""The fork server, its client, and what a forked child does from birth to its end."""
