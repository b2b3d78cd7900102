"""One reader for each format: pickles as data, archives, safetensors, DCP, manifests."""
