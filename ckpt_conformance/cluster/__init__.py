"""Items of a plan on the workers of a cluster, by dask.distributed (the extra `cluster`).

A command names a `Job`: a function that any worker can import, and what was asked for. The client
deals out batches of items; a worker hands each batch to its runner, a process of its own in which
the function runs; results come back as JSON. `distributed` is imported only where it is used.

client (`client.py`) -> scheduler -> worker (`worker.py`) -> keeper -> runner (`runner.py`)
"""
