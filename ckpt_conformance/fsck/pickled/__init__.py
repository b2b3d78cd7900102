"""Pickles read as data: no name is imported, and nothing is called."""
