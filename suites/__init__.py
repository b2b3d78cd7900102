"""The suites: one module per subject, such as errors of I/O; each check verifies one invariant.

They know managers only through the contract and through files on disk. They import no torch.
"""
