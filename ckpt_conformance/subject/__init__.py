"""The subject: what suites speak to, and the oracles that judge what a manager gave back."""
