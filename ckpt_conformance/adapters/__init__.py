"""Bundled adapters: a module per manager, under 120 lines of code; third-party imports are lazy."""
