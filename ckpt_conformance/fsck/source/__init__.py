"""Where a checkpoint lies, a path or a URL, and what is said of its files."""
