"""Judge each checkpoint: structure, then digests and CRCs, and what its library writes."""
