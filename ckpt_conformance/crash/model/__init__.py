"""Persistence models: which contents of the disk are legal after a crash; each is written twice."""
