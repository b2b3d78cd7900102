"""The same for a training script that nobody changed: the command itself recovers."""
