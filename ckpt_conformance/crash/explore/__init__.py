"""Recovers from every legal crash state of a save: lay it out, load, judge, shrink, keep."""
