"""The workload: the training job that is saved and resumed, in one process and on ranks."""
