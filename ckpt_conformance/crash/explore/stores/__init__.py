"""What is explored of a store of objects: saves whose mirror lies in one."""

MIRRORED = "mirrored"
"""The workload of stores; `store_saves` records it, and is imported late."""
