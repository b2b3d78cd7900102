"""Processes of ours: forked, followed, reaped, with memory of their own; below all other rooms."""
