"""Bundled adapters: a module per manager, under 60 lines of code; third-party imports are lazy."""
