"""Visit every legal crash state of a save: lay it out, recover, judge, shrink, keep."""
