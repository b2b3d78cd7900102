"""Compare two checkpoints by the names of what they hold."""
