"""Commands on a cluster (`--on`): what a worker does for each, and what its client deals out.

A module that a worker's runner imports is named after what it does there; beside it, `*_client` is
the command's end of it.
"""
