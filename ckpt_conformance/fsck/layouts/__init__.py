"""What below a path is one checkpoint, and which files of it belong together."""
