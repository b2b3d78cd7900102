"""Conformance and corruption suite for training checkpoint managers."""

__version__ = "0.1.0"
