"""The suites: one module per promise of the project; each check verifies one invariant.

They know managers only through the contract and through files on disk. They import no torch.
"""
