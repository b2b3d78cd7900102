"""Judge each checkpoint: structure, then digests and CRCs, and what a library should have written."""
