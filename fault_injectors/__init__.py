"""Fault injectors: one module per fault. Each says what it models, what it does not, and how it proves that it fired."""
